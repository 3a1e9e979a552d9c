"""flex_attention is written out, and folded where its functions say what is known."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch._dynamo.exc import Unsupported

from tests.golden.capture import capture, changes, warnings
from tests.golden.golden_text import assert_golden
from tests.support.forms.attention_pattern_forms import Model
from tests.support.forms.flex_forms import (
    CALLS_OF_LAYER,
    CAUSAL,
    FORMS,
    LEFT,
    LENGTH,
)
from tests.support.this_torch import skip_if_scores_are_read_only

TOKENS = torch.zeros(2, LENGTH, dtype=torch.long)


def test_window(mesh):
    q, k, v = torch.randn(3, 2, 4, LENGTH, 8).unbind()
    found = capture(
        FORMS["window"],
        q,
        k,
        v,
        mesh=mesh,
        shard={"q": 2, "k": 2, "v": 2},
        until="decompose_flex_attention",
    )
    text = changes(found["decompose_flex_attention"])
    wrote = [x for x in text.splitlines() if x.startswith("+ ")]
    assert_golden(
        "\n".join(wrote),
        """\
+ arange_2 = arange(17, dtype=torch.int32, device=cpu)
+ reshape_2 = reshape(arange_2, [1, 1, -1, 1])
+ arange_3 = arange(17, dtype=torch.int32, device=cpu)
+ reshape_3 = reshape(arange_3, [1, 1, 1, -1])
+ transpose = transpose(l_k_, -2, -1)
+ matmul = matmul(l_q_, transpose)
+ mul = mul(matmul, 0.353553)
+ ge = ge(reshape_2, reshape_3)
+ sub = sub(reshape_2, reshape_3)
+ lt = lt(sub, 5)
+ and_ = and_(ge, lt)
+ where = where(and_, mul, -inf)
+ _safe_softmax = _safe_softmax(where, -1)
+ matmul_1 = matmul(_safe_softmax, l_v_)""",
    )


TEXTS = {
    "documents": "causal, equal ids",
    "window": "causal, window 5",
    "softcap": "causal",
    "alibi": "causal, bias by distance",
    "relative": "bias by distance",
    "with_sinks": "causal, window 5",
}


@pytest.mark.parametrize("name", FORMS)
def test_what_masks_say(mesh, name):
    found = capture(Model(FORMS[name]), TOKENS, mesh=mesh, strategy="auto")
    assert found["fold_attention_patterns"].rewrites == len(found.ctx.findings.plans)
    assert len(found.ctx.findings.plans) == 2 * CALLS_OF_LAYER[name]
    texts = {mask.text for mask in found.ctx.findings.masks.values()}
    assert texts == ({TEXTS[name]} if name in TEXTS else set())


@pytest.mark.parametrize("name", LEFT)
def test_others_are_written_out_and_named(mesh, name):
    found = capture(Model(LEFT[name]), TOKENS, mesh=mesh, strategy="auto")
    assert found["decompose_flex_attention"].rewrites == 2
    assert not (found.ctx.findings.plans or found.ctx.findings.row_parallel)
    assert len(found.ctx.findings.unmatched_attention) == 2


def without_gradients(attend, mesh):
    """torch itself refuses writes to scores that have gradients."""
    q, k, v = torch.randn(3, 2, 4, LENGTH, 8).unbind()
    with skip_if_scores_are_read_only():
        found = capture(attend, q, k, v, mesh=mesh, strategy="auto")
    assert found.error is None
    return found.ctx


def test_writes_to_the_score_are_read(mesh):
    """Methods of tensors are known by their names, also where they write."""

    def in_place(score, b, h, q_idx, kv_idx):
        return score.div_(2.0).tanh().mul_(2.0)

    def attend(q, k, v):
        return flex.flex_attention(q, k, v, score_mod=in_place)

    (call,) = without_gradients(attend, mesh).findings.calls
    assert call.softcap == 2.0


def test_other_writes_are_named(mesh):
    def in_place(score, b, h, q_idx, kv_idx):
        return score.exp_()

    def attend(q, k, v):
        return flex.flex_attention(q, k, v, score_mod=in_place)

    ctx = without_gradients(attend, mesh)
    assert not (ctx.findings.plans or ctx.findings.row_parallel)
    assert len(ctx.findings.unmatched_attention) == 1


REFUSED = {
    "side effects": "Mutating a variable from outside the scope of this HOP",
    "branches": "Detected data-dependent branching",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_torch_refuses_in_a_score_mod(mesh, kind):
    """With one error, before anything is shared out."""
    seen = []

    def score_mod(score, b, h, q_idx, kv_idx):
        if kind == "side effects":
            seen.append(1)
        elif score > 0:
            return score
        return score * 2

    def attend(q, k, v):
        return flex.flex_attention(q, k, v, score_mod=score_mod)

    with pytest.raises(Unsupported, match=REFUSED[kind]):
        capture(Model(attend), TOKENS, mesh=mesh)


def test_blocks_alone_are_refused(mesh):
    """torch's kernels would use them, and its eager mode would not."""
    ones = torch.ones(1, 1, 1, dtype=torch.int32)
    blocks = flex.BlockMask.from_kv_blocks(
        ones, ones.new_zeros(1, 1, 1, 1), seq_lengths=(LENGTH, LENGTH)
    )

    def attend(q, k, v):
        return flex.flex_attention(q, k, v, block_mask=blocks)

    error = capture(Model(attend), TOKENS, mesh=mesh).error
    assert "got a block mask whose mask_mod hides nothing" in str(error)


def test_options_of_torchs_kernel_are_named(mesh, caplog):
    def attend(q, k, v):
        options = {"BLOCK_M": 32}
        return flex.flex_attention(q, k, v, block_mask=CAUSAL, kernel_options=options)

    capture(Model(attend), TOKENS, mesh=mesh)
    texts = [x for x in warnings(caplog) if "kernel_options" in x]
    assert (
        texts
        and "kernel_options ['BLOCK_M'] is not met: these are for torch's" in texts[0]
    )
