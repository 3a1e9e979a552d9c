"""Masks that are buffers are right in every call, also when the buffer has changed.

All numbers are float64, and so is the reference of one process; see Note [Derived
bounds] in tests/support/bounds.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cpcompile.passes.model.masks import constant_buffers
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.one_call import message_of
from tests.support.bounds import check, deviations, step
from tests.support.constant_masks import (
    LONGEST,
    READ,
    STAYS,
    Attribute,
    Masked,
    causal,
    numbers,
    token_ids,
)


class Pair:
    """A compiled model, and the same in one process."""

    def __init__(
        self, mask: torch.Tensor, world: int, kind: type = Masked, **more: object
    ) -> None:
        torch._dynamo.reset()
        constant_buffers.forget()
        torch.manual_seed(3)
        self.whole = kind(mask).double()
        self.model = copy.deepcopy(self.whole)
        options = {"mesh": sequence_mesh(world), "inner": "aot_eager", **more}
        self.compiled = torch.compile(self.model, backend="cp", options=options)

    def step(self, length: int = 24) -> tuple:
        """Deviations of loss and gradients, and what was read of the mask."""
        tokens = token_ids(length)
        with recording() as reports:
            got = step(self.compiled, self.model, tokens)
        found = deviations(got, step(self.whole, self.whole, tokens))
        (call,) = reports[0].calls
        return found, call.mask, call.plan is not None

    def change(self, write: Callable[[Masked], object]) -> None:
        write(self.whole)
        write(self.model)


def another(model: Masked, window: int) -> Tensor:
    seen, mask = causal(window), model.attn_mask
    return seen if mask.dtype == torch.bool else numbers(seen).to(mask)


def in_place(window: int) -> Callable[[Masked], object]:
    return lambda model: model.attn_mask.copy_(another(model, window))


def replaced(window: int) -> Callable[[Masked], object]:
    return lambda model: setattr(model, "attn_mask", another(model, window))


CHANGES = {
    "in place": in_place,
    "replaced": replaced,
}


def run(case: str, lengths: tuple[int, ...], world: int, strategy: str) -> list[tuple]:
    pair = Pair((READ | STAYS)[case][0], world, strategy=strategy)
    return [pair.step(length) for length in lengths]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", ["numbers", "lowest", "window", "blocks", "holes"])
def test_loss_and_gradients(pools, case, world):
    answers = pools[world].run(run, case, (24,), world, "ring", timeout=120)
    for ((found, text, sharded),) in answers:
        check(found)
        assert text == (READ | STAYS)[case][1].replace("is_causal", "causal")
        assert sharded


def test_each_length_has_its_part(pools):
    """Rows of the first part; the second length would be a symbol."""
    lengths = (24, 32, 17, LONGEST, 24)
    for answers in pools[2].run(run, "window", lengths, 2, "ring", timeout=170):
        for found, text, sharded in answers:
            check(found)
            assert text == "causal, window 6" and sharded


def run_changed(kind: str, case: str, world: int, model: type = Masked) -> list[tuple]:
    pair = Pair(READ[case][0], world, model)
    answers = [pair.step(), pair.step()]
    for window in (3, 3, 4):
        pair.change(CHANGES[kind](window))
        answers.append(pair.step())
    pair.change(lambda model: model.attn_mask.copy_(another(model, 4)))
    return [*answers, pair.step()]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("case", ["numbers", "bool"])
def test_a_buffer_that_changes_between_calls(pools, case, kind, world):
    windows = [3, 3, 4, 4]
    wanted = ["causal"] * 2 + [f"causal, window {n}" for n in windows]
    for answers in pools[world].run(run_changed, kind, case, world, timeout=120):
        assert [text for _, text, _ in answers] == wanted
        for found, _, sharded in answers:
            check(found)
            assert sharded


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", CHANGES)
def test_an_attribute_that_changes_between_calls(pools, kind, world):
    """As a buffer: `.double()` of the model leaves it as it is."""
    windows = [3, 3, 4, 4]
    wanted = ["causal"] * 2 + [f"causal, window {n}" for n in windows]
    args = (kind, "numbers", world, Attribute)
    for answers in pools[world].run(run_changed, *args, timeout=120):
        assert [text for _, text, _ in answers] == wanted
        for found, _, sharded in answers:
            check(found)
            assert sharded


def run_often_changed(world: int) -> tuple[list[tuple], int]:
    pair = Pair(numbers(causal()), world)
    torch._dynamo.utils.counters.clear()  # `reset` leaves them as they are
    answers = [pair.step()]
    for window in range(2, 12):
        pair.change(in_place(window))
        answers.append(pair.step())
    return answers, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_a_buffer_that_goes_on_changing_is_a_bias(pools):
    """Without it Dynamo would give up, and every rank run all of it in eager."""
    for answers, graphs in pools[2].run(run_often_changed, 2, timeout=170):
        for found, _, sharded in answers:
            check(found)
            assert sharded
        texts = [text for _, text, _ in answers]
        assert texts[3] == "causal, window 4"
        assert set(texts[4:]) == {"dense float64 [24, 24]"}
        assert graphs == constant_buffers.MOST_VALUES + 1


def run_one_rank_changed(when: str) -> str:
    pair = Pair(numbers(causal()), 2)
    if when == "later":
        pair.step()
    if dist.get_rank() == 1:
        pair.change(in_place(3))
    return message_of(pair.step)


@pytest.mark.parametrize("when", ["at first", "later"])
def test_a_buffer_of_one_rank(pools, when):
    """No rank runs a mask that another rank does not have."""
    texts = pools[2].run(run_one_rank_changed, when, timeout=120)
    assert all("RankMismatchError" in text for text in texts), texts
    if when == "at first":
        assert all("value of buffer attn_mask: rank 0 has " in x for x in texts), texts
        assert all("give the mask one value on all ranks" in x for x in texts)


def run_without_guards() -> list[str]:
    pair = Pair(numbers(causal()), 2)
    with mock.patch.object(constant_buffers, "guard_value"):
        pair.step()
    same = message_of(pair.step)
    pair.change(in_place(3))
    return [same, message_of(pair.step)]


def test_where_dynamo_does_not_ask_it_raises(pools):
    """The old program is not run, whatever becomes of guards."""
    for same, changed in pools[2].run(run_without_guards, timeout=120):
        assert same == "nothing was raised"
        assert changed.startswith(
            "BufferChangedError: buffer attn_mask has changed since"
        )
