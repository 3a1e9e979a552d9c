"""Random programs that write in place between two attention calls equal one process."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

import cpcompile as cp
from cpcompile import config
from tests.cpu.against_one_process import compare
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.programs import WIDTH, attend
from tests.support.bounds import (
    Deviation,
    Values,
    check,
    deviations,
    in_one_process,
    step,
)
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


def run_programs(seeds, seq: int, door: str) -> dict[int, list[Deviation]]:
    """Those of loss and gradient, for each program that is not refused.

    Whether .contiguous() of a DTensor is the same memory is not known, for example.
    """
    found = {}
    mesh = sequence_mesh(torch.distributed.get_world_size())
    for seed in seeds:
        torch._dynamo.reset()
        torch.manual_seed(seed)
        model = Writes(seed)
        tokens = torch.randint(0, 50, (4, seq))
        values = in_one_process(lambda x, t=tokens: step(x, x, t), model)
        options = {"inner": "aot_eager"}
        given = cp.shard(tokens, mesh, 1)
        if door == "plain":
            options |= {"mesh": mesh, "shard": {"tokens": 1}}
            given = tokens
        compiled = torch.compile(model, backend="cp", options=options)
        try:
            found[seed] = deviations(step(compiled, model, given), *values)
        except BackendCompilerFailed as error:
            assert door == "dtensor" and "shares its memory with" in str(error)
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
    for found in pools[world].run(run_programs, seeds, seq, door, timeout=160):
        for each in found.values():
            check(each)
        assert len(found) >= (4 if door == "dtensor" else len(seeds))


# Defined where this file is imported: on every rank, and where tests are collected.
@torch.library.custom_op("cp_writes::scale", mutates_args={"x"})
def scale(x: torch.Tensor, by: float) -> None:
    """Writes into its first argument, and returns nothing."""
    x.mul_(by)


class Scales(nn.Module):
    """An operator writes into what attention gave, called by its packet or not."""

    def __init__(self, by_packet: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.by_packet = by_packet

    def forward(self, tokens):
        with torch.no_grad():
            x = attend(self.embedding(tokens)).clone()
            torch.ops.cp_writes.scale(x, 2.0) if self.by_packet else scale(x, 2.0)
            return x + 1


def run_operators(by_packet: bool) -> list[Deviation]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Scales(by_packet)
    tokens = torch.randint(0, 50, (2, 17))
    values = in_one_process(lambda alone: {"out": alone(tokens)}, model)
    mesh = sequence_mesh(torch.distributed.get_world_size())
    options = {"inner": "aot_eager", "mesh": mesh, "shard": {"tokens": 1}}
    compiled = torch.compile(model, backend="cp", options=options, fullgraph=True)
    return deviations({"out": compiled(tokens)}, *values)


@pytest.mark.parametrize("by_packet", [True, False])
def test_an_operator_that_writes_into_its_argument(pools, by_packet):
    for found in pools[2].run(run_operators, by_packet, timeout=90):
        check(found)


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


def run_cached(seq: int) -> list[Deviation]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Cached()
    both = torch.randint(0, 50, (2, 2, seq))

    def run(call: nn.Module, model: Cached) -> Values:
        found = {}
        with torch.inference_mode():
            for number, tokens in enumerate(both):
                found[f"out {number}"] = call(tokens, torch.arange(seq))
        return found | {"keys": model.keys, "values": model.values}

    values = in_one_process(lambda alone: run(alone, alone), model)
    mesh = sequence_mesh(torch.distributed.get_world_size())
    options = {"inner": "aot_eager", "mesh": mesh, "shard": {"tokens": 1}}
    compiled = torch.compile(model, backend="cp", options=options, fullgraph=True)
    return deviations(run(compiled, model), *values)


@pytest.mark.slow(but_every=2)
@pytest.mark.parametrize(("seq", "world"), [(16, 2), (13, 3)])
def test_a_cache_that_the_model_keeps(pools, seq, world):
    """Every rank has all of a buffer, and so writes all of it."""
    for found in pools[world].run(run_cached, seq, timeout=90):
        check(found)


class WrittenCopy(nn.Module):
    """An empty cache is joined as caches begin; what is written is the result alone."""

    def forward(self, x):
        y = x.relu()
        joined = torch.cat([x.new_empty(0), y])
        joined.add_(1)
        return F.scaled_dot_product_attention(y, y, joined)


def run_copy(door: str):
    return compare(WrittenCopy, (2, 12, 8), 2, door, strategy="ring")


@pytest.mark.parametrize("door", ["plain", "dtensor"])
def test_a_joined_tensor_is_a_copy(pools, door):
    for found in pools[2].run(run_copy, door, timeout=60):
        found.check()


class Unrecorded(nn.Module):
    """Writes under no_grad, which leave a value its gradient; x is [B, S, C]."""

    writes = (
        lambda y: y.add_(1.0),
        lambda y: y.__setitem__((slice(None), 0), 0.5),
        lambda y: y[:, 2:5].mul_(2.0),
        lambda y: y.__setitem__(y > 1.0, 1.0),
        lambda y: y[..., :3].copy_(y[..., 3:6].clone()),
    )

    def forward(self, x):
        results = []
        for write in self.writes:
            y = attend(x) * 1.0
            z = y * 0.5
            with torch.no_grad():
                write(y)
            results.append(y * 2 + z)
        return tuple(results)


def run_unrecorded(world):
    comparison = compare(Unrecorded, (2, 4 * world, WIDTH), world)
    comparison.check()


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_writes_that_autograd_does_not_see(pools, world):
    pools[world].run(run_unrecorded, world)


class WritesAtData(nn.Module):
    """Tokens in an order that is data are written to a copy; x is [B, S, C]."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = attend(x)
        z = y.clone()
        order = torch.arange(x.shape[1]).flip(0) * 5 % x.shape[1]
        z[:, order] = self.mix(y)[:, order] * 2
        return attend(self.mix(z))


def run_at_data(tokens):
    return compare(WritesAtData, (2, tokens, WIDTH), 2)


@pytest.mark.parametrize("tokens", [12, 9])
def test_a_write_of_tokens_in_an_order_of_data(pools, tokens):
    """No dimension of the copy is one along which what is written is exchanged."""
    pools[2].run(run_at_data, tokens)[0].check()


class GivenMemory(nn.Module):
    """Results that are written to out=: of a weight, as by spectral_norm, of tokens."""

    direction: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("direction", torch.zeros(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        memory = torch.zeros_like(x)
        with torch.no_grad():
            first = torch.mv(self.weight, torch.ones_like(self.direction))
            direction = F.normalize(first, dim=0, out=self.direction)
        length = direction @ self.weight @ torch.ones_like(direction)
        y = attend(x @ self.weight / length)
        with torch.no_grad():
            torch.mean(y, (0, 1), out=self.mean)
            torch.add(y, 1.0, out=memory)
        return y * self.mean, memory * y


def run_given_memory(world):
    comparison = compare(GivenMemory, (2, 4 * world + 1, WIDTH), world)
    comparison.check()


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_results_that_are_written_to_out(pools, world):
    pools[world].run(run_given_memory, world)


class JoinsByWrites(nn.Module):
    """Keys are joined by methods that write, whose results nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.split = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.split(x)[:, None].chunk(3, -1)
        keys = k.new_empty(k.shape)
        keys[..., :3].copy_(k[..., :3])
        keys[..., 3:].copy_(k[..., 3:].sin())
        scaled = v * 1.0
        scaled[..., 1:].mul_(0.5)
        hidden = F.scaled_dot_product_attention(q, keys, scaled, is_causal=True)
        result = hidden.square()
        result.add_(1.0)
        return {"result": result, "hidden": hidden}


class OnlyTheResult(JoinsByWrites):
    def forward(self, x):
        return {"result": super().forward(x)["result"]}


def run_for_one_result():
    mesh = sequence_mesh(2)
    found = {}
    for name, make, settings in (
        ("asked", JoinsByWrites, {"outputs": ["result"]}),
        ("whole", OnlyTheResult, {}),
    ):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = make().double(), torch.randn(2, 8, WIDTH, dtype=torch.float64)
        options = {"mesh": mesh, "inner": "aot_eager"}
        with config.patch(settings):
            result = torch.compile(model, backend="cp", options=options)(x)["result"]
        result.square().sum().backward()
        gradients = {n: p.grad for n, p in model.named_parameters()}
        found[name] = {"result": result.detach(), **gradients}
    torch.manual_seed(0)
    alone, x = OnlyTheResult().double(), torch.randn(2, 8, WIDTH, dtype=torch.float64)
    wanted = alone(x)["result"]
    wanted.square().sum().backward()
    gradients = {n: p.grad for n, p in alone.named_parameters()}
    return found, {"result": wanted.detach(), **gradients}


def test_writes_stay_where_other_results_are_not_made(pools):
    for found, wanted in pools[2].run(run_for_one_result):
        for values in found.values():
            for name, x in wanted.items():
                torch.testing.assert_close(values[name], x, rtol=1e-10, atol=1e-10)


class WritesParameters(nn.Module):
    """It keeps its own weights in bounds, as Gemma 3n does, and lets others decay."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens):
        if self.training:
            self.head.weight.data.clamp_(-0.1, 0.1)
            with torch.no_grad():
                self.embedding.weight.mul_(0.9)
                self.head.bias.copy_(self.head.bias * 0.5)
        logits = self.head(attend(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def run_steps_that_write(seq: int):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = WritesParameters().double()
    alone = copy.deepcopy(model)
    options = {"mesh": sequence_mesh(2), "inner": "aot_eager"}
    compiled = torch.compile(model, backend="cp", options=options)
    for call, module in ((compiled, model), (alone, alone)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        for number in range(3):
            tokens = torch.arange(2 * seq).reshape(2, seq) * (number + 1) % 50
            optimizer.zero_grad()
            call(tokens).backward()
            optimizer.step()
    return [dict(x.state_dict()) for x in (model, alone)]


@pytest.mark.parametrize("seq", [8, 9])
def test_a_parameter_that_the_model_writes(pools, seq):
    for found, wanted in pools[2].run(run_steps_that_write, seq):
        for name, x in wanted.items():
            torch.testing.assert_close(found[name], x, rtol=1e-12, atol=1e-12)
