"""A folded model computes the bits of the one whose blocks stand in the graph."""

import pytest

from tests.support.bounds import assert_equal
from tests.support.forms.folded_graphs import folded
from tests.support.forms.repeated_models import LAYERS, Kind, new_model, two_steps

KINDS = {
    "plain": Kind(),
    "tied": Kind(tied=True),
    # Without torch's kernel, whose random state checkpoints keep by an operator.
    "checkpointed": Kind(checkpointed=True, no_softmax=True),
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
    # The backward of the first block ends with what embeds the tokens.
    assert found.counts == [[LAYERS], [LAYERS - 1]]
    for name, x in separate.items():
        assert_equal(name, got[name], x)


# Of 7 layers the one in the middle differs. A block may begin within a layer.
ODD = {
    "constant": [[3, 3], [3]],
    "dtype": [[3, 3], [3, 3]],
    "call": [[3, 3], [3, 3]],
    "operand": [[3, 4], [4]],
}


@pytest.mark.parametrize(("odd", "counts"), ODD.items(), ids=ODD)
def test_a_block_that_differs_stays_apart(odd, counts):
    separate, got, found = both(Kind(odd=odd), layers=7)
    assert found.counts == counts
    for name, x in separate.items():
        assert_equal(name, got[name], x)
