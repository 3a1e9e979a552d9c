"""Blocks under a mask: their size, and rows, biases and dtypes that are special."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.step import row_gradients, rows_under_mask
from cpcompile.ops.step.kernel_choice import masked_kernel
from cpcompile.ops.step.row_mask import RowMask
from tests.support.attention_calls import attention
from tests.support.bounds import (
    OPERAND_SCALE,
    assert_close,
    check,
    deviation,
    largest,
)
from tests.unit.ops.operands import make_operands

S, SCALE = 37, 0.3
local_attention = attention("local")


def attend(q, k, v, bias, key_ranges=None):
    """out, dq, dk, dv and dbias, if the bias wants one."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, _ = local_attention(*leaves, SCALE, bias=bias, key_ranges=key_ranges)
    wanted = [*leaves, *([bias] if bias is not None and bias.requires_grad else [])]
    return [out.detach(), *torch.autograd.grad(out, wanted, torch.ones_like(out))]


def reference(q, k, v, bias, hidden, dtype):
    """The same computed in `dtype`, of a bias without -inf."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, bias)]
    mask = leaves[3].masked_fill(hidden, -torch.inf)
    out = F.scaled_dot_product_attention(
        *leaves[:3], attn_mask=mask, scale=SCALE, enable_gqa=True
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def reference_of_lost(q, k, v, bias, hidden, dtype, lost, softcap=0.0):
    """Of rows whose scores are 0, but for their gradients, as autograd has them."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, bias)]
    scores = leaves[0] @ leaves[1].mT * SCALE
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = torch.where(lost, scores - scores.detach(), scores) + leaves[3]
    out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ leaves[2]
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def check_results(got, q, k, v, bias, hidden, lost=None, **others):
    given = (q, k, v, bias, hidden)
    exact, rough = (
        reference(*given, dtype)
        if lost is None
        else reference_of_lost(*given, dtype, lost, **others)
        for dtype in (torch.float64, torch.float32)
    )
    names = ("out", "dq", "dk", "dv", "dbias")
    for name, *each in zip(names, got, exact, rough, strict=False):
        assert_close(name, *each, floor=OPERAND_SCALE)


def causal():
    i = torch.arange(S)
    key_ranges = torch.stack([i * 0, i + 1], -1).int().unsqueeze(0)
    return key_ranges, torch.ones(S, S, dtype=torch.bool).triu(1)


BIASES = [(1, 1), (2, 1), (1, 4), (2, 4)]


@pytest.mark.parametrize("elements", [1, 100, 5000, 1 << 24])
@pytest.mark.parametrize("sizes", BIASES, ids=str)
@pytest.mark.parametrize("grad", [True, False])
def test_masks_and_scores_are_bounded(monkeypatch, elements, sizes, grad):
    """And the result does not depend on how it is cut."""
    masks, scores = [0], [0]
    of_block, math = RowMask.of_block, row_gradients.math_backward

    def noted_mask(self, part, dtype):
        mask = of_block(self, part, dtype)
        masks.append(mask.numel())
        return mask

    def noted_scores(*args, **named):
        results = math(*args, **named)
        scores.append(results[3].numel())
        return results

    monkeypatch.setattr(RowMask, "of_block", noted_mask)
    monkeypatch.setattr(row_gradients, "math_backward", noted_scores)
    monkeypatch.setattr(rows_under_mask, "MASK_ELEMENTS", elements)
    q, k, v = make_operands(torch.float32, 2, S, S)
    bias = torch.randn(*sizes, S, S, requires_grad=grad)
    key_ranges, hidden = causal()
    got = attend(q, k, v, bias, key_ranges)
    assert len(got) == 4 + grad
    check_results(got, q, k, v, bias, hidden)
    assert 0 < max(masks) <= max(elements, sizes[0] * sizes[1])
    assert (max(scores) > 0) is grad
    assert max(scores) <= max(elements, 2 * 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad", [True, False])
def test_a_row_whose_bias_hides_all_keys_is_zero(dtype, grad):
    q, k, v = make_operands(dtype, 4, S, S)
    bias = torch.zeros(1, 1, S, S, dtype=dtype)
    bias[..., ::2, :] = -torch.inf
    out, dq, *rest = attend(q, k, v, bias.requires_grad_(grad))
    assert not out[:, :, ::2].any() and not dq[:, :, ::2].any()
    assert out[:, :, 1::2].any() and all(x.isfinite().all() for x in rest)
    _, lse = local_attention(q, k, v, SCALE, bias=bias)
    assert (lse[:, :, ::2] == -torch.inf).all()
    assert lse[:, :, 1::2].isfinite().all()


LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("low", [LOWEST, -1e30, -1e9, -1e6, -1e4])
@pytest.mark.parametrize("grad", [True, False])
def test_a_row_of_low_numbers_is_the_same_in_parts(monkeypatch, low, grad):
    """Note [Rows of low numbers]: the mean where there are no digits for scores."""
    monkeypatch.setattr(rows_under_mask, "MASK_ELEMENTS", 256)
    q, k, v = make_operands(torch.float32, 4, S, S)
    bias = torch.randn(2, 1, S, S).masked_fill(causal()[1], low)
    bias[:, :, ::3] = low
    got = attend(q, k, v, bias.requires_grad_(grad))
    # One number for a whole row changes nothing; 0 keeps the digits of its scores.
    alone = torch.arange(S).unsqueeze(-1) % 3 == 0
    shifted = bias.detach().masked_fill(alone, 0)
    lost = alone if low < -1e8 else None
    check_results(got, q, k, v, shifted, shifted == low, lost)
    if lost is not None:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(SDPBackend.MATH):  # flash forgets how many keys there are
            out = F.scaled_dot_product_attention(*leaves, bias, scale=SCALE)
        theirs = [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]
        check_results(theirs, q, k, v, shifted, shifted == low, lost)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("elements", [100, 1 << 24])
def test_gradients_of_lost_rows(monkeypatch, grad, softcap, elements):
    """Padding on the left of one entry of the batch, with the gradients of autograd."""
    for module in (rows_under_mask, row_gradients):
        monkeypatch.setattr(module, "MASK_ELEMENTS", elements)
    q, k, v = make_operands(torch.float32, 4, S, S)
    bias = torch.zeros(2, 1, S, S).masked_fill(causal()[1], LOWEST)
    bias[1, :, :, :5] = LOWEST
    lost = torch.zeros(2, 1, S, 1, dtype=torch.bool)
    lost[1, :, :5] = True
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    leaves += [bias.requires_grad_(grad)]
    out, _ = local_attention(*leaves[:3], SCALE, bias=bias, softcap=softcap)
    wanted = leaves[: 3 + grad]
    got = [out.detach(), *torch.autograd.grad(out, wanted, torch.ones_like(out))]
    shifted = bias.detach().masked_fill(lost, 0)
    check_results(got, q, k, v, shifted, shifted == LOWEST, lost, softcap=softcap)


@pytest.mark.parametrize("low", [LOWEST, -1e9])
def test_what_limits_hide_is_not_the_highest(monkeypatch, low):
    monkeypatch.setattr(rows_under_mask, "MASK_ELEMENTS", 256)
    q, k, v = make_operands(torch.float32, 4, S, S)
    key_ranges, hidden = causal()
    bias = torch.zeros(2, 1, S, S)
    bias[0, :, :, : S // 2] = low  # all that the first rows see
    got, _ = local_attention(q, k, v, SCALE, bias=bias, key_ranges=key_ranges)
    # Those rows have no digits for scores: they are means.
    alone = torch.zeros(2, 1, S, 1, dtype=torch.bool)
    alone[0, :, : S // 2] = True
    shifted = bias.masked_fill(alone, 0)
    check_results([got], q.masked_fill(alone, 0), k, v, shifted, hidden)


def test_a_row_that_sees_one_chunk_only_has_the_lse_of_that():
    """Hidden in one part, not in another: a zero there would be a key more."""
    q, k, v = make_operands(torch.float32, 4, S, S)
    key_ranges = torch.tensor([[[0, 1]] * (S - 1) + [[0, S]]]).int()
    _, lse = local_attention(q, k, v, SCALE, key_ranges=key_ranges)
    exact, rough = (
        (x @ y.mT * SCALE)[:, :, :-1, 0] for x, y in ((q.double(), k.double()), (q, k))
    )
    assert_close("lse", lse[:, :, :-1], exact, rough, OPERAND_SCALE)


def test_a_bias_of_more_digits_keeps_them():
    """bfloat16 would round 1001 to 1000, and 1001.5 too."""
    q, k, v = (x * 0 for x in make_operands(torch.bfloat16, 4, S, S))
    v = v + torch.randn_like(v)
    bias = torch.full((1, 1, S, S), 1000.0)
    bias[..., ::3] += 1.0
    assert masked_kernel(q, v, bias) is StepKernel.MATH
    out, _ = local_attention(q, k, v, SCALE, bias=bias)
    expected = bias.double().softmax(-1) @ v.double()
    # Sums are float32, and rounded once.
    limit = torch.finfo(torch.bfloat16).eps * largest(expected)
    check([deviation("out", out, expected, limit=limit)])


def test_causal_documents_need_no_mask(monkeypatch):
    """Each is one causal call, wherever it begins; results are those of its mask."""
    length, documents = 700, torch.tensor([0, 290, 311, 640])
    ids = torch.bucketize(torch.arange(length), documents, right=True)[None].int()
    i = torch.arange(length)
    key_ranges = torch.stack([i * 0, i + 1], -1).int()[None]
    hidden = (i[:, None] < i) | (ids[0][:, None] != ids[0])
    masks = []

    def noted(self, part, dtype, of_block=RowMask.of_block):
        masks.append(of_block(self, part, dtype))
        return masks[-1]

    monkeypatch.setattr(RowMask, "of_block", noted)
    leaves = make_operands(torch.float32, 2, length, length)
    leaves = [x.requires_grad_() for x in leaves]
    given = {"key_ranges": key_ranges, "q_segment_ids": ids, "kv_segment_ids": ids}
    out, _ = local_attention(*leaves, SCALE, **given)
    got = [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]
    # One tile has two short ones, and a mask; all others are rectangles and triangles.
    assert [x is None for x in masks].count(False) == 2  # forward and backward
    check_results(got, *leaves, torch.zeros(1, 1, 1, 1), hidden)
