"""flex_attention is written out, and folded where its functions say what is known."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.flex_attention as flex

from tests.golden.capture import capture, warnings
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
    assert not (found.ctx.findings.plans or found.ctx.findings.row_parallel)
    assert len(found.ctx.findings.unmatched_attention) == 2


@pytest.mark.parametrize("is_known", [True, False])
def test_writes_to_the_score(mesh, is_known):
    """Methods of tensors are known by their names, also where they write."""

    def in_place(score, b, h, q_idx, kv_idx):
        return score.div_(2.0).tanh().mul_(2.0) if is_known else score.exp_()

    def attend(q, k, v):
        return flex.flex_attention(q, k, v, score_mod=in_place)

    # torch itself refuses writes to scores that have gradients
    q, k, v = torch.randn(3, 2, 4, LENGTH, 8).unbind()
    with skip_if_scores_are_read_only():
        captured = capture(attend, q, k, v, mesh=mesh, strategy="auto")
    found = captured.ctx.findings
    assert captured.error is None
    assert [call.softcap for call in found.plans] == [2.0] * is_known
    assert len(found.unmatched_attention) == (not is_known)
    assert not found.row_parallel


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
