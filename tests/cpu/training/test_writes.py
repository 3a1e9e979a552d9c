"""Random programs that write in place between two attention calls equal one process."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.tensor import DTensor

import cpcompile as cp
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.programs import WIDTH, attend, relative_error
from tests.support.writes import program


class Writes(nn.Module):
    """Its program runs on activations [B, S, C], and all of its results count."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.program = program(seed, 4 + seed % 5)

    def forward(self, tokens):
        x = attend(self.embedding(tokens))
        loss = attend(x + x.sin()).square().mean()
        for number, result in enumerate(self.program(x)):
            loss = loss + 1e-3 * (number + 1) * result.square().mean()
        return loss


def run_programs(seeds, seq: int, door: str) -> dict[int, float]:
    """The error of loss and gradient of each program that is not refused.

    Whether .contiguous() of a DTensor is the same memory is not known, for example.
    """
    found = {}
    mesh = sequence_mesh(torch.distributed.get_world_size())
    for seed in seeds:
        torch._dynamo.reset()
        torch.manual_seed(seed)
        model = Writes(seed)
        tokens = torch.randint(0, 50, (4, seq))
        wanted = model(tokens)
        (gradient,) = torch.autograd.grad(wanted, model.embedding.weight)
        options = {"inner": "aot_eager"}
        given = cp.shard(tokens, mesh, 1)
        if door == "plain":
            options |= {"mesh": mesh, "shard": {"tokens": 1}}
            given = tokens
        try:
            loss = torch.compile(model, backend="cp", options=options)(given)
        except BackendCompilerFailed as error:
            assert door == "dtensor" and "shares its memory with" in str(error)
            continue
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        (got,) = torch.autograd.grad(loss, model.embedding.weight)
        found[seed] = max(relative_error(loss, wanted), relative_error(got, gradient))
    return found


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize(
    ("door", "seeds"),
    [
        ("plain", range(3)),
        pytest.param("plain", range(3, 6), marks=pytest.mark.slow),
        ("dtensor", range(6)),
    ],
)
@pytest.mark.parametrize(
    ("world", "seq"), [(2, 8), pytest.param(3, 10, marks=pytest.mark.slow)]
)
def test_random_programs(pools, door, seeds, world, seq):
    for errors in pools[world].run(run_programs, seeds, seq, door, timeout=160):
        assert max(errors.values()) < 1e-5, errors
        assert len(errors) >= (4 if door == "dtensor" else len(seeds))


# Defined where this file is imported: on every rank, and where tests are collected.
@torch.library.custom_op("cp_writes::scale", mutates_args={"x"})
def scale(x: torch.Tensor, by: float) -> None:
    """Writes into its first argument, and returns nothing."""
    x.mul_(by)


def run_operators(by_packet: bool) -> float:
    torch._dynamo.reset()
    torch.manual_seed(0)
    embedding = nn.Embedding(50, WIDTH)
    tokens = torch.randint(0, 50, (2, 17))

    def step(tokens):
        with torch.no_grad():
            x = attend(embedding(tokens)).clone()
            torch.ops.cp_writes.scale(x, 2.0) if by_packet else scale(x, 2.0)
            return x + 1

    mesh = sequence_mesh(torch.distributed.get_world_size())
    options = {"inner": "aot_eager", "mesh": mesh, "shard": {"tokens": 1}}
    got = torch.compile(step, backend="cp", options=options, fullgraph=True)(tokens)
    return relative_error(got, step(tokens))


@pytest.mark.parametrize("by_packet", [True, False])
def test_an_operator_that_writes_into_its_argument(pools, by_packet):
    assert max(pools[2].run(run_operators, by_packet, timeout=90)) < 1e-5


class Cached(nn.Module):
    """Keys and values go into buffers, as inference loops have them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(2, 4, 24, WIDTH // 4))

    def forward(self, tokens, positions):
        x = self.embedding(tokens)
        q = x.unflatten(-1, (4, -1)).transpose(1, 2)
        before = (self.keys[:, :, : tokens.shape[1]] * q).sum()
        self.keys[:, :, positions] = q.sin()
        self.values.index_copy_(2, positions, q.cos())
        k, v = (x[:, :, : tokens.shape[1]] for x in (self.keys, self.values))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y + before + (k * q).sum()


def run_cached(seq: int) -> float:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Cached()
    alone = copy.deepcopy(model)
    mesh = sequence_mesh(torch.distributed.get_world_size())
    options = {"inner": "aot_eager", "mesh": mesh, "shard": {"tokens": 1}}
    step = torch.compile(model, backend="cp", options=options, fullgraph=True)
    worst = 0.0
    for _ in range(2):
        tokens = torch.randint(0, 50, (2, seq))
        with torch.inference_mode():
            pairs = [tuple(f(tokens, torch.arange(seq)) for f in (step, alone))]
        pairs += [(model.keys, alone.keys), (model.values, alone.values)]
        worst = max(worst, *(relative_error(got, wanted) for got, wanted in pairs))
    return worst


@pytest.mark.parametrize(("seq", "world"), [(16, 2), (13, 3)])
def test_a_cache_that_the_model_keeps(pools, seq, world):
    """Every rank has all of a buffer, and so writes all of it."""
    assert max(pools[world].run(run_cached, seq, timeout=90)) < 1e-5
