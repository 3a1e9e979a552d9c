"""Which operand of a product of pairs of tokens has the keys, and where it is whole."""

import pytest
import torch

from tests.golden.capture import capture, changes
from tests.golden.golden_text import lines_with
from tests.golden.operands import attend
from tests.support.sparse_attention import WIDTH, Indexed, ScoresOfBlocks


def found(module, mesh, width=WIDTH):
    x = torch.zeros(2, 40, width)
    captured = capture(module, x, mesh=mesh, shard={"x": 1})
    assert captured.error is None, captured.error
    return captured["exchange_mixers"]


FORMS = {
    "matmul": Indexed,
    "einsum": lambda: Indexed("einsum"),
    "one head": lambda: Indexed("one head"),
    "heads first": lambda: Indexed("heads first"),
    "blocks": ScoresOfBlocks,
}


@pytest.mark.parametrize("name", FORMS)
def test_an_indexer(name, mesh):
    """The keys are gathered where they are narrowest: before they are expanded."""
    step = found(FORMS[name](), mesh)
    assert step.rewrites == 1
    marks = lines_with(changes(step), "'all rows'")
    assert len(marks.splitlines()) == 1
    assert name != "matmul" or "constraint(k_1, 'all rows', 1)" in marks


def of_pairs(make):
    """Attention, and something that is made of all pairs of its tokens."""

    def forward(x):
        y = attend(x, 2)
        return make(y, y.relu(), y.tanh())

    return forward


KEYS = {
    "rows": lambda x, q, k: (q @ k.mT).topk(3, -1).values,
    "columns": lambda x, q, k: (q @ k.mT).topk(3, -2).values,
    "a maximum": lambda x, q, k: torch.einsum("bsd,btd->bst", q, k).amax(-1),
    "a sort": lambda x, q, k: torch.bmm(q, k.mT).sigmoid().sort(-1).values,
}


@pytest.mark.parametrize("name", KEYS)
def test_what_brings_keys_together(name, mesh):
    assert found(of_pairs(KEYS[name]), mesh, 8).rewrites == 1


TWINS = {
    "a sum over the keys": lambda x, q, k: (q @ k.mT) @ x,
    "queries meet as well": lambda x, q, k: (q @ k.mT).flatten(1).topk(3, -1).values,
    "a product for each token": lambda x, q, k: (q.unsqueeze(2) @ k.unsqueeze(-1)).amax(
        -1
    ),
    "over the tokens": lambda x, q, k: (q.mT @ k).topk(3, -1).values,
    "a weight": lambda x, q, k: (q @ torch.ones(8, 40, device=q.device)).amax(-1),
    "nothing brings them together": lambda x, q, k: q @ k.mT,
}


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_stays(name, mesh):
    assert found(of_pairs(TWINS[name]), mesh, 8).rewrites == 0
