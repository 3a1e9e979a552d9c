"""Ranks that call a compiled program differently: an error on all, before they mix."""

import time

import pytest
import torch
from torch.distributed.tensor import distribute_module

import cpcompile as cp
from cpcompile import config
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.rank_check_cases import Model, compiled, error_of


def run_different_values():
    rank = torch.distributed.get_rank()
    model = Model()
    step, x = compiled(model, check_ranks=1, shard={"x": 1})
    mask = torch.rand(1, 1, 16, 16) < 0.8
    texts = {"same": error_of(lambda: step(x, mask).backward())}
    other = torch.randn(1, 32, 8).chunk(2, dim=1)[rank].flatten().view(1, 16, 8)
    texts["chunk"] = error_of(lambda: step(other, mask))
    flipped = mask.clone()
    flipped[0, 0, 3, 1] ^= rank == 1
    texts["mask"] = error_of(lambda: step(x, flipped))
    with torch.no_grad():
        model.gain[5] += rank
        texts["buffer"] = error_of(lambda: step(x, mask))
        model.gain[5] -= rank
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))
        optimizer.step()
        texts["optimizer"] = error_of(lambda: step(x, mask))
    return texts


@pytest.fixture(scope="module")
def value_texts(pools):
    texts = pools[2].run(run_different_values, timeout=120)
    assert texts[0] == texts[1]
    return texts[0]


CHUNK = "is it this rank's chunk of it? pass the whole, or cp.shard(whole, mesh, dim=1)"
INPUTS = {
    "chunk": ("call 2 of forward", "input x (float32 [1, 16, 8]): rank 0 has ", CHUNK),
    "mask": (
        "call 3 of forward",
        "input mask (bool [1, 1, 16, 16]): ",
        "the same whole",
    ),
}


@pytest.mark.parametrize("case", list(INPUTS))
def test_inputs_are_compared(value_texts, case):
    assert value_texts["same"] == ""
    assert "(all was the same in call 1)" in value_texts[case]
    for part in INPUTS[case]:
        assert part in value_texts[case]


@pytest.mark.parametrize(
    "case, named",
    [("buffer", "buffer gain: rank 0 has "), ("optimizer", "parameter qkv.weight: ")],
)
def test_parameters_and_buffers_are_compared(value_texts, case, named):
    """Under no_grad it is another program, whose first call this is."""
    assert "in call 1 of forward" in value_texts["buffer"]
    assert named in value_texts[case]
    assert "give the optimizers of all ranks the same settings" in value_texts[case]


def run_first_calls():
    """What differs in a first call: weights, and the random state."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    step, _ = compiled(Model())
    x = torch.ones(1, 16, 8)
    texts = {"weights": error_of(lambda: step(x))}
    torch.manual_seed(0)
    model = Model(dropout=0.5)
    step, _ = compiled(model)
    torch.manual_seed(rank)
    texts["dropout"] = error_of(lambda: step(x))
    torch.manual_seed(0)
    texts["seeded"] = error_of(lambda: step(x))
    torch.manual_seed(rank)
    texts["dropout again"] = error_of(lambda: step(x))
    model.eval()  # draws nothing, so that the random state does not matter
    texts["eval"] = error_of(lambda: step(x))
    return texts


def test_first_calls_are_compared(pools):
    texts, others = pools[2].run(run_first_calls, timeout=120)
    assert texts == others
    assert "parameter qkv.weight: rank 0 has " in texts["weights"]
    assert "torch.manual_seed" in texts["weights"]
    for case in ("dropout", "dropout again"):
        assert "the random state: rank 0 has " in texts[case]
        assert "seed alike (torch.manual_seed)" in texts[case]
    assert texts["seeded"] == texts["eval"] == ""


def run_number():
    """Another float argument; the second value makes it an input of the graph."""
    rank = torch.distributed.get_rank()
    model = Model()
    torch._dynamo.reset()
    options = {"mesh": sequence_mesh(2), "inner": "aot_eager"}

    def scaled(x, scale):
        return model(x) * scale

    step, x = (
        torch.compile(scaled, backend="cp", options=options),
        torch.randn(1, 16, 8),
    )
    with config.patch(check_ranks=1):
        assert error_of(lambda: [step(x, 1.0), step(x, 1.25)]) == ""
        return error_of(lambda: step(x, 1.5 + rank))


def test_numbers_are_compared(pools):
    for text in pools[2].run(run_number, timeout=60):
        if "compile different programs" in text:  # torch 2.15 has one for each number
            assert "RankMismatchError" in text
            continue
        assert "have different values in call 2 of scaled" in text
        assert "input scale (float64 []): rank 0 has " in text
        assert "pass the same number on every rank" in text


def run_late():
    """An input differs in one call only, in which values are not compared."""
    rank = torch.distributed.get_rank()
    step, x = compiled(Model(), check_ranks=5)
    texts = []
    for call in range(1, 6):
        other = x + (rank if call == 3 else 0)
        texts.append(error_of(lambda given=other: step(given)))
    return texts


def test_the_first_call_that_differs_is_named(pools):
    for texts in pools[2].run(run_late, timeout=60):
        assert texts[:4] == [""] * 4
        assert "in call 3 of forward (all was the same in call 1): input x" in texts[4]


def run_skipped():
    """Another order of a loader: one rank skips the second of its batches."""
    step, x = compiled(Model())
    rank = torch.distributed.get_rank()
    batches = [x, x + 1, x + 2, x + 3]
    if rank:
        del batches[1]
    texts = []
    for batch in batches[:3]:
        texts.append(error_of(lambda given=batch: step(given).backward()))
    return texts


def test_a_rank_that_skips_a_step(pools):
    for texts in pools[2].run(run_skipped, timeout=60):
        assert texts[0] == "" and "call 2 of forward" in texts[1]


def run_legitimate():
    """Ranks have other parts of DTensors, other random states, other moments."""
    rank = torch.distributed.get_rank()
    torch._dynamo.reset()
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
    return texts


def test_what_may_differ(pools):
    for texts in pools[2].run(run_legitimate, timeout=120):
        assert texts == [""] * len(texts)


def run_without():
    """check_ranks=0: what differs is not seen, and no rank waits for another one."""
    rank = torch.distributed.get_rank()
    model = Model()
    step, x = compiled(model, check_ranks=0)
    with torch.no_grad():
        step(x)
        model.gain += rank
        return error_of(lambda: step(x))


def test_it_can_be_switched_off(pools):
    assert pools[2].run(run_without, timeout=60) == ["", ""]
