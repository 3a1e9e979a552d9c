"""A score_mod of no known form becomes a text that operators compute by parts."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from tests.golden.capture import capture, changes
from tests.golden.golden_text import assert_golden
from tests.golden.operands import QKV
from tests.support.forms.attention_pattern_forms import Model
from tests.support.forms.flex_forms import (
    CALLS_OF_LAYER,
    LENGTH,
    SCORE_MODS,
)

TOKENS = torch.zeros(2, LENGTH, dtype=torch.long)


def by_head(q, k, v, weight):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score.abs() * weight[h]

    return flex_attention(q, k, v, score_mod=score_mod)


def test_graph(mesh):
    q, k, v = torch.randn(3, 2, 4, LENGTH, 8).unbind()
    found = capture(
        by_head, q, k, v, torch.randn(4), mesh=mesh, shard=QKV, until="insert_attention"
    )
    assert_golden(
        changes(found["insert_attention"]),
        """\
+ ring_attention_default = cp.ring_attention(l_q_, l_k_, l_v_, [reshape_5],
    sizes=[17, 17], spec='scale=0.353553 +bias score_mod=<text of 28 lines>',
    group=GROUP)
~ return: plain_attention -> ring_attention_default[0]
- plain_attention""",
    )


TEXTS = {
    "of_the_score": {"causal"},
    "squared": {"causal, equal ids"},
    "weighted_keys": {"causal"},
    "not_finite_where_hidden": {"causal"},
    "biased_lse": {"causal"},
}


@pytest.mark.parametrize("name", SCORE_MODS)
def test_calls_are_shared_out(mesh, name):
    """Masks are read besides; one that would be a bias is in the text alone."""
    found = capture(Model(SCORE_MODS[name]), TOKENS, mesh=mesh, strategy="auto")
    assert len(found.ctx.findings.plans) == 2 * CALLS_OF_LAYER[name]
    assert not found.ctx.findings.unmatched_attention
    assert {x.text for x in found.ctx.findings.masks.values()} == TEXTS.get(name, set())
    assert (
        len({call.score_mod for call in found.ctx.findings.plans}) == 1
    )  # layers share it
    for plan in found.ctx.findings.plans.values():
        excluded = {c.strategy_name: c.excluded for c in plan.candidates}
        assert excluded["ulysses"] is None and excluded["ring"] is None
