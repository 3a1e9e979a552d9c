"""One block against a float64 dense reference; see Note [Derived tolerances]."""

import pytest
import torch

from cpcompile.geometry.blocks import Block
from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.step.aten_flash import flash_backward
from cpcompile.ops.step.block_attention import block_attention, row_dots
from cpcompile.ops.step.math_attention import accumulation_dtype
from cpcompile.ops.step.row_gradients import RowGradients, SavedRows
from cpcompile.ops.step.row_work import RowWork
from tests.cpu.attention_cases import (
    Attended,
    AttentionCase,
    check,
    lse_tolerance,
    make_inputs,
)
from tests.support.bounds import check as check_bounds
from tests.support.bounds import deviation, largest
from tests.support.pairwise import in_pairs

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def gradients_of(grad, q, k, v, out, lse, triangular, scale, kernel):
    """dq, dk and dv of one block, given out and lse of all keys."""
    block = Block(0, q.shape[2], 0, k.shape[2], triangular)
    saved = SavedRows(grad, q, lse, out)
    gradients = RowGradients(RowWork(kernel, scale, (block,)), saved)
    return gradients.dq, *gradients.of_chunk(k, v)


def run(inputs, triangular, scale, kernel):
    """Forward and backward of one block; also the log-sum-exp."""
    q, k, v, grad = inputs
    out, lse = block_attention(q, k, v, triangular, scale, kernel)
    operands = (grad, q, k, v, out, lse)
    grads = gradients_of(*operands, triangular, scale, kernel)
    assert {x.dtype for x in grads} == {accumulation_dtype(q.dtype)}
    if kernel is StepKernel.FLASH:
        # aten rounds the gradients of heads before it sums those that share keys.
        rounded = q.shape[1] == k.shape[1]
        wanted = q.dtype if rounded else accumulation_dtype(q.dtype)
        assert {x.dtype for x in flash_backward(*operands, triangular, scale)} == {
            wanted
        }
    return Attended(out, *(x.to(q.dtype) for x in grads)), lse


def check_block(inputs, triangular, kernel, scale=None):
    q, k = inputs[:2]
    used = q.shape[-1] ** -0.5 if scale is None else scale
    got, lse = run(inputs, triangular, used, kernel)
    check(inputs, triangular, scale, got)
    assert lse.dtype == accumulation_dtype(q.dtype)
    exact, rough = (
        dense_lse(q, k, triangular, used, x) for x in (torch.float64, lse.dtype)
    )
    limit = lse_tolerance(q.dtype, exact, rough)
    check_bounds([deviation("lse", lse, exact, limit=limit)])


def dense_lse(q, k, triangular, scale, dtype):
    k = k.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q.to(dtype) @ k.mT * scale
    if triangular:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.logsumexp(-1)


@pytest.fixture(params=[StepKernel.FLASH, StepKernel.MATH], ids=lambda k: k.value)
def kernel(request):
    """aten's flash attention, and the plain math that runs where it cannot."""
    return request.param


@in_pairs(
    {
        "kernel": [StepKernel.FLASH, StepKernel.MATH],
        "dtype": DTYPES,
        "kv_heads": [4, 2, 1],
        "triangular": [True, False],
        "dims": [(16, 16), (7, 7), (80, 80), (7, 24), (24, 7)],
        "sizes": [(37, 37), (1, 1), (1, 40), (40, 1), (600, 33), (33, 600)],
        "scale": [None, 1.0, 0.01],
    }
)
def test_one_block(kernel, dtype, kv_heads, triangular, dims, sizes, scale):
    (rows, keys), (head_dim, value_dim) = sizes, dims
    case = AttentionCase(
        dtype=dtype,
        kv_heads=kv_heads,
        seq=rows,
        kv_seq=keys,
        head_dim=head_dim,
        value_dim=value_dim,
    )
    check_block(make_inputs(case), triangular, kernel, scale)


def tokens_before_heads(x):
    """The layout of a projection split in heads: [B, S, H, D] seen as [B, H, S, D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def dims_before_tokens(x):
    """No unit stride in the head dim."""
    return x.mT.contiguous().mT


def every_second_token(x):
    padded = x.new_full((*x.shape[:2], 2 * x.shape[2], x.shape[3]), float("nan"))
    padded[:, :, ::2] = x
    return padded[:, :, ::2]


LAYOUTS = [tokens_before_heads, dims_before_tokens, every_second_token]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value_dim", [16, 9])
def test_strided_operands(kernel, layout, dtype, value_dim):
    case = AttentionCase(dtype=dtype, kv_heads=2, seq=20, value_dim=value_dim)
    *qkv, grad = make_inputs(case)
    check_block((*map(layout, qkv), grad), True, kernel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seq", [8, 20])
def test_weights_add_up_to_one_however_large_scores_are(kernel, seq, dtype):
    q, k, v, _ = make_inputs(AttentionCase(dtype=dtype, seq=seq))
    out, lse = block_attention(q * 100, k, torch.ones_like(v), True, 0.25, kernel)
    assert lse.max() > 100  # of which rounding takes 60 eps and more
    # Weights are rounded twice, their sum and the sum by which they are divided once
    # for each key, and no partial sum is above 1.
    limit = (2 * seq + 2) * torch.finfo(dtype).eps / 2
    check_bounds([deviation("sums of weights", out, torch.ones_like(out), limit=limit)])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("seq", [8, 20])  # fewer than 16 keys are left to plain math
def test_rows_that_do_not_see_a_key_are_finite_whatever_it_is(kernel, seq, value):
    q, k, v, _ = make_inputs(AttentionCase(seq=seq))
    expected, _ = block_attention(q, k, v, True, 0.25, kernel)
    k[:, :, 5] = value
    out, lse = block_attention(q, k, v, True, 0.25, kernel)
    assert lse[:, :, :5].isfinite().all()
    assert torch.equal(out[:, :, :5], expected[:, :, :5])
    assert out[:, :, 5:].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_dots_of_rows(dtype):
    """Accumulated in float32 (float64), never in the 16 bits of the operands."""
    grad, _, _, out = make_inputs(AttentionCase(dtype=dtype, seq=20))
    dots = row_dots(grad, out)
    assert dots.dtype == accumulation_dtype(dtype)
    products = grad.double() * out.double()
    # One rounding per product and per addition of 16 terms.
    limit = 2 * 16 * torch.finfo(dots.dtype).eps * largest(products.abs().sum(-1))
    check_bounds([deviation("dots", dots, products.sum(-1), limit=limit)])
