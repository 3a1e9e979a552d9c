"""Which operand of a product of pairs of tokens has the keys, and where it is whole."""

import pytest
import torch

from tests.golden.capture import capture, changes, sharded
from tests.golden.golden_text import assert_golden
from tests.golden.operands import attend
from tests.support.sparse_attention import WIDTH, Indexed, ScoresOfBlocks


def found(module, mesh, tokens=40):
    x = torch.zeros(2, tokens, WIDTH)
    return capture(module, x, mesh=mesh, shard={"x": 1}, until="split_pairs_by_rows")[
        "split_pairs_by_rows"
    ]


def test_an_indexer(mesh):
    """The keys are gathered where they are narrowest: before they are expanded."""
    step = found(Indexed(), mesh)
    assert step.rewrites == 1
    assert_golden(
        changes(step),
        """\
+ constraint = constraint(k_1, 'all rows', 1)
~ transpose_3: k_1 -> constraint""",
    )


FORMS = {
    "einsum": lambda: Indexed("einsum"),
    "one head": lambda: Indexed("one head"),
    "heads first": lambda: Indexed("heads first"),
    "blocks": ScoresOfBlocks,
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form(name, mesh):
    step = found(FORMS[name](), mesh)
    assert step.rewrites == 1
    assert step.after.count("'all rows'") == 1


def of_pairs(make):
    """Attention, and something that is made of all pairs of its tokens."""

    def forward(x):
        y = attend(x, 2)
        return make(y, y.relu(), y.tanh())

    return forward


def marks(make, mesh):
    captured = sharded(of_pairs(make), mesh, 2, 40, 8)
    return captured["split_pairs_by_rows"].rewrites


KEYS = {
    "rows": lambda x, q, k: (q @ k.mT).topk(3, -1).values,
    "columns": lambda x, q, k: (q @ k.mT).topk(3, -2).values,
    "a maximum": lambda x, q, k: torch.einsum("bsd,btd->bst", q, k).amax(-1),
    "a sort": lambda x, q, k: torch.bmm(q, k.mT).sigmoid().sort(-1).values,
}


@pytest.mark.parametrize("name", KEYS)
def test_what_brings_keys_together(name, mesh):
    assert marks(KEYS[name], mesh) == 1


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
    assert marks(TWINS[name], mesh) == 0
