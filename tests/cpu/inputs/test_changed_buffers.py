"""Masks that are buffers are right in every call, also when the buffer has changed.

All numbers are float64, and so is the reference of one process; see Note [Derived
bounds] in tests/support/bounds.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cpcompile.passes.model.masks import constant_buffers
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import compiled_on
from tests.cpu.on_ranks import on_ranks
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
        self.compiled = compiled_on(world, self.model, **more)

    def step(self, length: int = 24) -> str:
        """Compare loss and gradients; say what was read of the mask."""
        tokens = token_ids(length)
        with recording() as reports:
            got = step(self.compiled, self.model, tokens)
        check(deviations(got, step(self.whole, self.whole, tokens)))
        (call,) = reports[0].calls
        assert call.plan is not None
        return call.mask

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


CHANGES = {"in place": in_place, "replaced": replaced}


@on_ranks(2)
def test_many_lengths():
    """The second would be a symbol; each has rows of the first part."""
    mask, wanted = (READ | STAYS)["window"]
    pair = Pair(mask, 2, strategy="ring")
    for length in (24, 32, 17, LONGEST, 24):
        assert pair.step(length) == wanted.replace("is_causal", "causal")


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize(
    ("case", "model"),
    [("numbers", Masked), ("bool", Masked), ("numbers", Attribute)],
)
@on_ranks("world")
def test_a_buffer_that_changes_between_calls(case, model, kind, world):
    """An attribute is as a buffer, but that `.double()` of the model leaves it."""
    pair = Pair(READ[case][0], world, model)
    assert [pair.step(), pair.step()] == ["causal"] * 2
    for window in (3, 3, 4):
        pair.change(CHANGES[kind](window))
        assert pair.step() == f"causal, window {window}"
    pair.change(lambda model: model.attn_mask.copy_(another(model, 4)))
    assert pair.step() == "causal, window 4"


@on_ranks(2)
def test_a_buffer_that_goes_on_changing_is_a_bias():
    """Without it Dynamo would give up, and every rank run all of it in eager."""
    pair = Pair(numbers(causal()), 2)
    torch._dynamo.utils.counters.clear()  # `reset` leaves them as they are
    texts = [pair.step()]
    for window in range(2, 12):
        pair.change(in_place(window))
        texts.append(pair.step())
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert texts[3] == "causal, window 4"
    assert set(texts[4:]) == {"dense float64 [24, 24]"}
    assert graphs == constant_buffers.MOST_VALUES + 1


@pytest.mark.parametrize("when", ["at first", "later"])
@on_ranks(2)
def test_a_buffer_of_one_rank(when):
    """No rank runs a mask that another rank does not have."""
    pair = Pair(numbers(causal()), 2)
    if when == "later":
        pair.step()
    if dist.get_rank() == 1:
        pair.change(in_place(3))
    text = message_of(pair.step)
    assert "RankMismatchError" in text
    if when == "at first":
        assert "value of buffer attn_mask: rank 0 has " in text
        assert "give the mask one value on all ranks" in text
