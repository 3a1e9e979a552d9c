"""Tests whose bodies run on ranks: which ranks, and what a failure says."""

import pytest
import torch.distributed as dist

from tests.cpu.on_ranks import on_ranks
from tests.cpu.workers import ProcessFailedError


@pytest.mark.parametrize("world", [1, 2])
@on_ranks("world")
def test_an_argument_says_how_many(world):
    assert dist.get_world_size() == world


@pytest.mark.parametrize("half", [1])
@on_ranks(lambda half: 2 * half)
def test_a_function_says_how_many(half):
    assert dist.get_world_size() == 2 * half


@on_ranks(1)
def fails(number):
    assert number + 1 == 4


def test_a_failing_assertion_says_the_values(pools):
    with pytest.raises(ProcessFailedError, match=r"assert \(2 \+ 1\) == 4"):
        fails(pools, number=2)
