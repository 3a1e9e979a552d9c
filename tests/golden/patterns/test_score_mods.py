"""A score_mod of no known form becomes a text that operators compute by parts."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from cpcompile.reporting.graph_report import recording
from tests.golden.capture import capture, changes
from tests.golden.golden_text import assert_golden
from tests.golden.operands import QKV
from tests.support.forms.attention_pattern_forms import Model
from tests.support.forms.flex_forms import (
    CALLS_OF_LAYER,
    LENGTH,
    SCORE_MODS,
)
from tests.support.score_programs import text_of

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
    assert found["decompose_flex_attention"].rewrites == 0
    assert_golden(
        changes(found["decompose_flex_attention"]),
        """\
+ reshape_4 = reshape(l_weight_, (-1,))
+ to_3 = to(reshape_4, torch.float32)
+ cat = cat([to_3])
+ reshape_5 = reshape(cat, (1, 1, -1))
+ plain_attention = plain_attention(l_q_, l_k_, l_v_, scale=0.353553, score_mod=<text of
    28 lines>, values=reshape_5)
~ return: flex_attention[0] -> plain_attention
- flex_attention""",
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


def test_text():
    def score_mod(score, b, h, q_idx, kv_idx, weight):
        return score * weight[h]

    weight = torch.zeros(4, requires_grad=True)
    text = text_of(score_mod, [weight], torch.zeros(1, 4, 5, 8), mask_mod=None)
    lines = [x.split(";")[0].replace("torch.ops.", "") for x in text.splitlines()]
    assert_golden(
        "\n".join(
            x for x in lines if x.strip() and "sym_size" not in x and ".detach" not in x
        ),
        """\
def forward(arg0_1, arg1_1, arg2_1, arg3_1, arg4_1, arg5_1):
    select = aten.select.int(arg0_1, 0, 0)
    select_1 = aten.select.int(select, 0, 0)
    slice_1 = aten.slice.Tensor(select_1, 0, 0, 4)
    view = aten.view.default(slice_1, [4])
    index = aten.index.Tensor(view, [arg3_1])
    mul = aten.mul.Tensor(arg1_1, index)
    return expand
def backward(arg0_1, arg1_1, arg2_1, arg3_1, arg4_1, arg5_1, arg6_1):
    select = aten.select.int(detach_1, 0, 0)
    select_1 = aten.select.int(select, 0, 0)
    slice_1 = aten.slice.Tensor(select_1, 0, 0, 4)
    view = aten.view.default(slice_1, [4])
    index = aten.index.Tensor(view, [arg3_1])
    mul_1 = aten.mul.Tensor(arg6_1, detach_3)
    mul_2 = aten.mul.Tensor(arg6_1, detach_2)
    sum_1 = aten.sum.dim_IntList(mul_1, [0, 2, 3], True)
    new_zeros = aten.new_zeros.default(sum_1, [4], dtype = torch.float32, layout =
        torch.strided, device = device(type='cpu'))
    index_put = aten.index_put.default(new_zeros, [arg3_1], sum_1, True)
    view_1 = aten.view.default(index_put, [4])
    return (mul_2, select_backward_1)""",
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


def test_captured_tokens_of_another_length(mesh):
    """What it captures has a size in its text: every length has a graph of its own."""
    options = {"mesh": mesh, "inner": "aot_eager"}

    def attend(q, k, v):
        weight = v.square().mean((1, 3))

        def score_mod(score, b, h, q_idx, kv_idx):
            return score * weight[b, kv_idx]

        return flex_attention(q, k, v, score_mod=score_mod)

    compiled = torch.compile(Model(attend), backend="cp", options=options)
    for length in (17, 24, 33):
        with recording() as reports:
            compiled(torch.zeros(2, length, dtype=torch.long)).sum().backward()
        (report,) = reports
        assert [call.plan is not None for call in report.calls] == [True] * 2
        assert not report.by_hand
