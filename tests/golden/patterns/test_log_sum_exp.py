"""The log-sum-exp of scores is a result of the operator that computes attention."""

import pytest
import torch

from tests.golden.capture import capture, changes, localised
from tests.golden.golden_text import assert_golden
from tests.golden.operands import QKV
from tests.support.forms.attention_pattern_forms import Model, causal
from tests.support.forms.flex_forms import FORMS, LENGTH

TOKENS = torch.zeros(2, LENGTH, dtype=torch.long)


def test_of_flex_attention(mesh):
    q, k, v = torch.randn(3, 2, 4, LENGTH, 8).unbind()
    found = capture(
        FORMS["lse_alone"], q, k, v, mesh=mesh, shard=QKV, until="insert_attention"
    )
    assert_golden(
        changes(found["insert_attention"]),
        """\
+ ring_attention_default = cp.ring_attention(l_q_, l_k_, l_v_, sizes=[17, 17],
    spec='causal scale=0.353553 lse', group=GROUP)
~ mul_3: log_sum_exp -> ring_attention_default[1]
- arange, reshape, arange, reshape, ge, plain_attention, log_sum_exp""",
    )


def with_lse(found, operator):
    """Whether each call of an operator gives a log-sum-exp."""
    return [" lse'" in x for x in found.lines(f" = cp.{operator}(").splitlines()]


def test_of_grouped_heads(mesh):
    """The repetition of keys is folded for both."""
    given = {"mesh": mesh, "until": "insert_attention"}
    found = capture(Model(FORMS["with_sinks"]), TOKENS, **given)
    assert found["fold_kv_repeat"].rewrites == 2
    assert "repeat_interleave" not in found.text
    assert with_lse(found, "ring_attention") == [True] * 2


def test_every_strategy_has_it(mesh):
    found = capture(Model(FORMS["with_sinks"]), TOKENS, mesh=mesh, strategy="auto")
    for plan in found.ctx.findings.plans.values():
        reasons = {c.strategy_name: c.excluded for c in plan.candidates}
        assert reasons["ulysses"] is None and reasons["ring"] is None
    found = localised(Model(FORMS["with_sinks"]), TOKENS, mesh=mesh, strategy="ulysses")
    assert [call.form for call in found.report.calls] == ["ulysses"] * 2
    assert with_lse(found, "local_attention") == [True] * 2


def form(scores_of, lse_of=lambda scores: scores.logsumexp(-1).unsqueeze(-1)):
    """Attention by hand, times what is made of its scores."""

    def attend(q, k, v):
        scores = scores_of(q @ k.mT, causal(q))
        return scores.softmax(-1) @ v * lse_of(scores)

    return attend


def plain(scores, seen):
    return scores


def read_before(q, k, v):
    """The values are made of it."""
    scores = q @ k.mT
    return scores.softmax(-1) @ (v * scores.logsumexp(-1).unsqueeze(-1))


def written_between(q, k, v):
    """It is that of other scores than the softmax has."""
    scores = q @ k.mT
    lse = scores.logsumexp(-1)
    scores.mul_(2.0)
    return scores.softmax(-1) @ v * lse.unsqueeze(-1)


BY_HAND = {
    "causal": form(lambda scores, seen: scores.masked_fill(~seen, -torch.inf)),
    # The twins; a number changes no softmax, but this.
    "keeping the dimension": form(plain, lambda x: x.logsumexp(-1, keepdim=True)),
    "raised": form(lambda scores, seen: scores + 3.0),
    "hidden by low numbers": form(lambda scores, seen: scores.masked_fill(~seen, -1e9)),
    "over queries": form(plain, lambda x: x.logsumexp(-2).unsqueeze(-1)),
    "read before": read_before,
    "written between": written_between,
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(mesh, name):
    found = capture(Model(BY_HAND[name]), TOKENS, mesh=mesh, strategy="auto")
    assert found["fold_attention_patterns"].rewrites == 2 * (name == "causal")
    assert found.error is None
