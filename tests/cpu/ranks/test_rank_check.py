"""Ranks that call programs differently, or in another order: an error on all."""

import contextlib
import time

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import distribute_module

import cpcompile as cp
from cpcompile import config
from tests.cpu.attention_cases import compiled_on, sequence_mesh
from tests.cpu.on_ranks import on_ranks

# Seconds in which a difference has to be known, on a busy machine too; a message of the
# group would be waited for 60 s.
SOON_SECONDS = 30.0


class Model(nn.Module):
    """A float sequence, a buffer, and perhaps a mask."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("gain", torch.ones(8))

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x * self.gain).unsqueeze(1).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return self.dropout(y).pow(2).mean()


def compiled(model, ranks=2, check_ranks="auto", **options):
    """The model, which is called under the setting, and its float input."""
    torch._dynamo.reset()
    step = compiled_on(ranks, model, **options)

    def call(*args):
        with config.patch(check_ranks=check_ranks):
            return step(*args)

    return call, torch.randn(1, 16, 8)


def error_of(act):
    """The text of the RankMismatchError that `act` raises, soon; "" if none."""
    start = time.monotonic()
    try:
        act()
    except Exception as error:  # while it compiles it is torch's BackendCompilerFailed
        if "RankMismatchError" not in f"{type(error).__name__}: {error}":
            raise
        assert time.monotonic() - start < SOON_SECONDS
        return str(error)
    return ""


OPTIMIZERS = "give the optimizers of all ranks the same settings"


@on_ranks(2)
def test_values_are_compared():
    rank = torch.distributed.get_rank()
    model = Model()
    step, x = compiled(model, check_ranks=1, shard={"x": 1})
    mask = torch.rand(1, 1, 16, 16) < 0.8
    assert error_of(lambda: step(x, mask).backward()) == ""
    other = torch.randn(1, 32, 8).chunk(2, dim=1)[rank].flatten().view(1, 16, 8)
    text = error_of(lambda: step(other, mask))
    assert "call 2 of forward (all was the same in call 1)" in text
    assert "input x (float32 [1, 16, 8]): rank 0 has " in text
    assert "is it this rank's chunk of it? pass the whole, or cp.shard(whole, " in text
    flipped = mask.clone()
    flipped[0, 0, 3, 1] ^= rank == 1
    text = error_of(lambda: step(x, flipped))
    assert "call 3 of forward (all was the same in call 1)" in text
    assert "input mask (bool [1, 1, 16, 16]): " in text and "the same whole" in text
    with torch.no_grad():  # another program, whose first call this is
        model.gain[5] += rank
        text = error_of(lambda: step(x, mask))
        assert "in call 1 of forward" in text and "buffer gain: rank 0 has " in text
        assert OPTIMIZERS in text
        model.gain[5] -= rank
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))
        optimizer.step()
        text = error_of(lambda: step(x, mask))
    assert "parameter qkv.weight: " in text and OPTIMIZERS in text


@on_ranks(2)
def test_first_calls_are_compared():
    """What differs in a first call: weights, and the random state."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    step, _ = compiled(Model())
    x = torch.ones(1, 16, 8)
    text = error_of(lambda: step(x))
    assert "parameter qkv.weight: rank 0 has " in text and "torch.manual_seed" in text
    torch.manual_seed(0)
    model = Model(dropout=0.5)
    step, _ = compiled(model)
    for differ in (True, False, True):
        torch.manual_seed(rank if differ else 0)
        text = error_of(lambda: step(x))
        assert ("the random state: rank 0 has " in text) == differ
        assert ("seed alike (torch.manual_seed)" in text) == differ
    model.eval()  # draws nothing, so that the random state does not matter
    assert error_of(lambda: step(x)) == ""


@on_ranks(2)
def test_numbers_are_compared():
    """Another float argument; the second value makes it an input of the graph."""
    model = Model()

    def scaled(x, scale):
        return model(x) * scale

    step, x = compiled(scaled, check_ranks=1)
    assert error_of(lambda: [step(x, 1.0), step(x, 1.25)]) == ""
    text = error_of(lambda: step(x, 1.5 + torch.distributed.get_rank()))
    if "compile different programs" in text:  # torch 2.15 has one for each number
        assert "RankMismatchError" in text
        return
    assert "have different values in call 2 of scaled" in text
    assert "input scale (float64 []): rank 0 has " in text
    assert "pass the same number on every rank" in text


@on_ranks(2)
def test_the_first_call_that_differs_is_named():
    """An input differs in one call only, in which values are not compared."""
    rank = torch.distributed.get_rank()
    step, x = compiled(Model(), check_ranks=5)
    texts = []
    for call in range(1, 6):
        other = x + (rank if call == 3 else 0)
        texts.append(error_of(lambda given=other: step(given)))
    assert texts[:4] == [""] * 4
    assert "in call 3 of forward (all was the same in call 1): input x" in texts[4]


@on_ranks(2)
def test_a_rank_that_skips_a_step():
    """Another order of a loader: one rank skips the second of its batches."""
    step, x = compiled(Model())
    batches = [x, x + 1, x + 2]
    if torch.distributed.get_rank():
        del batches[1]
    first, second = (
        error_of(lambda given=batch: step(given).backward()) for batch in batches[:2]
    )
    assert first == "" and "call 2 of forward" in second


@on_ranks(2)
def test_what_may_differ():
    """Ranks have other parts of DTensors, other random states, other moments."""
    rank = torch.distributed.get_rank()
    mesh = sequence_mesh(2)
    model = distribute_module(Model(), mesh)
    step = torch.compile(model, backend="cp", options={"inner": "aot_eager"})
    texts = []
    for length in (16, 17, 16, 17):
        x = torch.randn(1, length, 8, generator=torch.Generator().manual_seed(length))
        given = cp.shard(x, mesh, 1)
        texts.append(error_of(lambda given=given: step(given).backward()))
    model = Model(dropout=0.5).eval()
    step, x = compiled(model, check_ranks=1)
    torch.manual_seed(rank)
    for call in range(3):
        time.sleep(0.3 * (call % 2 == rank))
        texts.append(error_of(lambda: step(x).backward()))
        with torch.no_grad():
            texts.append(error_of(lambda: step(x)))
    assert texts == [""] * len(texts)


@on_ranks(2)
def test_it_can_be_switched_off():
    """What differs is not seen, and no rank waits for another one."""
    model = Model()
    step, x = compiled(model, check_ranks=0)
    with torch.no_grad():
        step(x)
        model.gain += torch.distributed.get_rank()
        assert error_of(lambda: step(x)) == ""


ORDER = {
    "backward": ("rank 0 runs the backward of forward (", "rank 1 runs forward ("),
    "explain": ("rank 0 runs forward (", "rank 1 runs the backward of forward ("),
    "no_grad": ("rank 0 runs forward (", "rank 1 compiles forward"),
    "autocast": ("rank 0 runs forward (", "rank 1 compiles forward"),
    "length": ("x [1, 16, 8]), call 2", "x [1, 32, 8]), call 2"),
}


@pytest.mark.parametrize("case", list(ORDER))
@on_ranks(2)
def test_ranks_do_the_same_in_the_same_order(case):
    """What one rank does besides, or not; values are compared in first calls only."""
    rank = torch.distributed.get_rank()
    step, x = compiled(Model(), check_ranks="first")
    step(x).backward()
    longer = torch.cat([x, x], dim=1)

    def act():
        if case == "length":
            step(longer if rank else x)
        elif case == "backward":
            loss = step(x)
            if rank == 0:
                loss.backward()
            step(x)
        elif case == "explain":
            if rank == 0:
                cp.explain(step, x)
            step(x).backward()
            step(x).backward()
        else:
            modes = {
                "no_grad": torch.no_grad(),
                "autocast": torch.autocast("cpu", torch.bfloat16),
            }
            with modes[case] if rank else contextlib.nullcontext():
                step(x).sum()

    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        if case == "length":
            step(longer).backward()
        text = error_of(act)
    assert "do different things: " in text
    for part in ORDER[case]:
        assert part in text


class Layers(nn.Module):
    """Layers that are called one by one after graph breaks, as one program."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = self.layer(x, layer)
        return x.sum().unsqueeze(0)

    @staticmethod
    def layer(x, layer):
        torch._dynamo.graph_break()
        y = layer(x)[:, None]
        return x + F.scaled_dot_product_attention(y, y, y)[:, 0]


@on_ranks(2)
def test_every_layer_counts_its_own_calls():
    """The last of three layers differs, in the second step."""
    rank = torch.distributed.get_rank()
    model = Layers()
    step, x = compiled(model, shard={"x": 1}, strict=False)
    first = error_of(lambda: step(x).backward())
    with torch.no_grad():
        model.layers[2].weight += rank
    assert first == ""
    second = error_of(lambda: step(x))
    assert "in call 2 of torch_dynamo_resume" in second
    assert "layer.weight: rank 0 has " in second
