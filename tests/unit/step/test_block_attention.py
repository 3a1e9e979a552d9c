"""One block, and merged ones, against float64; see Note [Derived tolerances]."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpcompile.geometry.blocks import Block
from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.step.aten_flash import flash_backward
from cpcompile.ops.step.block_attention import (
    block_attention,
    keys_of,
    row_dots,
    rows_of,
)
from cpcompile.ops.step.math_attention import accumulation_dtype
from cpcompile.ops.step.online_softmax import RunningAttention, merge_weight
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


EMPTY = float("-inf")
ROWS, DIM = 5, 4

seeds = st.integers(0, 2**16)
key_counts = st.lists(st.integers(0, 5), min_size=1, max_size=6)
heads = st.sampled_from([(1, 1), (4, 4), (4, 2), (4, 1)])
# The largest size of a logit; 1e4 overflows any exp.
logits = st.sampled_from([1.0, 30.0, 1e4])


def make_qkv(seed, heads, keys, logit, dtype=torch.float64):
    """q, k, v whose scores, with scale 1, reach from -logit to +logit."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.rand(2, heads[0], ROWS, DIM, generator=generator, dtype=dtype) * 2 - 1
    k = torch.rand(2, heads[1], keys, DIM, generator=generator, dtype=dtype) * 2 - 1
    v = torch.randn(2, heads[1], keys, 3, generator=generator, dtype=dtype)
    return q, k * (logit / DIM), v


def dense(q, k, v):
    """out and lse in float64 from all scores; rows without keys give 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ k.mT
    if scores.shape[-1] == 0:
        return torch.zeros(*q.shape[:3], v.shape[-1]).double(), scores.new_full(
            q.shape[:3], EMPTY
        )
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def error_limit(logit, parts, dtype=torch.float64):
    """A score has rounding errors of a few eps * logit; exp makes them relative ones.

    8 = 2 * DIM for the sum of a score and of a row; each merge adds one more.
    """
    return 8 * torch.finfo(dtype).eps * (logit + 10) * (parts + 1)


def assert_same(got, expected, limit):
    found = []
    for name, x, exact in zip(("out", "lse"), got, expected, strict=True):
        scale = 1 + largest(exact[exact.isfinite()])
        found.append(deviation(name, x, exact, limit=limit * scale))
    check_bounds(found)


def kernel_for(q):
    """Matrix products in float64; float32 takes aten's kernel."""
    return StepKernel.MATH if q.dtype == torch.float64 else StepKernel.FLASH


def add_block(running, q, k, v, block):
    """What an attention step does with each of its blocks."""
    q, k, v = rows_of(q, block), keys_of(k, block), keys_of(v, block)
    part = block_attention(q, k, v, block.triangular, 1.0, kernel_for(q))
    running.merge(block, *part)


def partial(q, k, v):
    if k.shape[2]:
        return block_attention(q, k, v, False, 1.0, kernel_for(q))
    return q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_full(q.shape[:3], EMPTY)


@settings(deadline=None)
@given(seeds, heads, key_counts, logits, st.randoms())
def test_running_attention_takes_chunks_in_any_order(
    seed, heads, counts, logit, random
):
    q, k, v = make_qkv(seed, heads, sum(counts), logit)
    chunks = list(zip(k.split(counts, 2), v.split(counts, 2), strict=True))
    random.shuffle(chunks)
    running = RunningAttention(q, v.shape[-1])
    for k_part, v_part in chunks:
        if keys := k_part.shape[2]:
            add_block(running, q, k_part, v_part, Block(0, ROWS, 0, keys, False))
    assert_same(running.result(True), dense(q, k, v), error_limit(logit, len(counts)))


@settings(deadline=None)
@given(seeds, heads, logits, st.data())
def test_rows_meet_their_keys_in_any_order(seed, heads, logit, data):
    """Some for the first time, and some not, in runs and at a distance."""
    starts = st.integers(0, ROWS - 1)
    runs = data.draw(st.lists(st.tuples(starts, starts, st.integers(1, 2)), max_size=6))
    q, k, v = make_qkv(seed, heads, 2 * max(len(runs), 1), logit)
    running = RunningAttention(q, v.shape[-1])
    met = [[] for _ in range(ROWS)]
    for number, (one, other, step) in enumerate(runs):
        rows = range(min(one, other), max(one, other) + 1, step)
        at = Block(rows.start, len(rows), 2 * number, 2, False, step)
        keys = slice(2 * number, 2 * number + 2)
        part = partial(
            q[:, :, rows.start : rows.stop : step], k[:, :, keys], v[:, :, keys]
        )
        running.merge(at, *part)
        for row in rows:
            met[row] += range(keys.start, keys.stop)
    out, lse = running.result(True)
    for row, keys in enumerate(met):
        if keys:
            expected = dense(q[:, :, row : row + 1], k[:, :, keys], v[:, :, keys])
            got = out[:, :, row : row + 1], lse[:, :, row : row + 1]
            assert_same(got, expected, error_limit(logit, len(runs)))
        else:
            assert not out[:, :, row].any()
            assert (lse[:, :, row] == -torch.inf).all()


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nothing_added_at_all(dtype, final):
    q, _, _ = make_qkv(0, (4, 2), 1, 1.0)
    out, lse = RunningAttention(q.to(dtype), 3).result(final)
    accumulation = torch.float64 if dtype == torch.float64 else torch.float32
    assert out.shape == (2, 4, ROWS, 3) and not out.any()
    assert out.dtype == (dtype if final else accumulation)
    assert (lse == EMPTY).all()
    assert lse.dtype == accumulation


# Values of a log-sum-exp that float32 meets, at and past the overflow of exp.
lse_values = st.sampled_from([EMPTY, -1e4, -300.0, -1.0, 0.0, 1.0, 300.0, 1e4])


@given(lse_values, lse_values)
def test_the_weight_is_the_share_of_the_new_part(lse, lse_new):
    weight = merge_weight(torch.tensor(lse), torch.tensor(lse_new))
    if lse_new == EMPTY:
        assert weight == 0
    else:
        expected = torch.tensor([lse, lse_new]).double().softmax(0)[1]
        # Of differences without rounding: some roundings, and the smallest number.
        roundings = 8 * torch.finfo(weight.dtype).eps
        smallest = torch.finfo(weight.dtype).smallest_normal
        limit = roundings * expected.item() + smallest * torch.finfo(weight.dtype).eps
        check_bounds([deviation("weight", weight, expected, limit=limit)])


@settings(deadline=None)
@given(seeds, heads, key_counts, logits)
def test_float32_is_finite_at_any_logit(seed, heads, counts, logit):
    q, k, v = make_qkv(seed, heads, sum(counts), logit, torch.float32)
    running = RunningAttention(q, v.shape[-1])
    for k_part, v_part in zip(k.split(counts, 2), v.split(counts, 2), strict=True):
        if keys := k_part.shape[2]:
            add_block(running, q, k_part, v_part, Block(0, ROWS, 0, keys, False))
    limit = error_limit(logit, len(counts), torch.float32)
    assert_same(running.result(True), dense(q, k, v), limit)
