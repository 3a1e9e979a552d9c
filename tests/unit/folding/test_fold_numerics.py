"""A folded model computes the bits of the one whose blocks stand in the graph."""

import pytest
import torch

from tests.support.bounds import assert_equal
from tests.support.folded_graphs import folded
from tests.support.repeated_models import LAYERS, Kind, new_model, two_steps

KINDS = {
    "plain": Kind(),
    "tied": Kind(tied=True),
    "checkpointed": Kind(checkpointed=True),
    "writes": Kind(writes=True),
    "rotary": Kind(rotary=True),
    "dropout": Kind(dropout=0.3),
}


def both(kind, layers=LAYERS):
    results, found = [], None
    for fold in (False, True):
        model = new_model(kind, layers)
        found = folded(model, fold)
        results.append(two_steps(found.call, model))
    return *results, found


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_bits_are_the_same(kind):
    separate, got, found = both(kind)
    assert found.counts == [[LAYERS], [LAYERS]]
    for name, x in separate.items():
        assert_equal(name, got[name], x)


@pytest.mark.parametrize("odd", ["constant", "dtype", "call", "operand"])
def test_a_block_that_differs_stays_apart(odd):
    separate, got, found = both(Kind(odd=odd), layers=7)
    assert found.counts == [[3, 3], [3, 3]]
    for name, x in separate.items():
        assert_equal(name, got[name], x)
