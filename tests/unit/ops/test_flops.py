"""FlopCounterMode counts the visible pairs of attention steps."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile.geometry.visibility import Visible
from cpcompile.ops.step.step_arguments import StepChunk
from tests.support.attention_calls import rest_of_local
from tests.unit.step.step_cases import BATCH, HEADS, MASKS, SCALE, mask_of

R, K, D, E, G = 11, 9, 8, 6, 2

ops = torch.ops.cp


def counted(fn, *args):
    """Floating point operations of fn(*args)."""
    with FlopCounterMode(display=False) as counter:
        fn(*args)
    return counter.get_total_flops()


def per_pair(head_dims, value_dims):
    """Two operations per multiplication and addition, in all heads of the batch."""
    return 2 * BATCH * HEADS * (head_dims * D + value_dims * E)


def operands(rows, keys):
    shapes = ((HEADS, rows, E), (HEADS, rows, D), (G, keys, D), (G, keys, E))
    return [torch.randn(BATCH, *shape) for shape in shapes]


@pytest.mark.parametrize("kernel", ["aten_flash", "aten_math"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("R", "K"), [(11, 9), (0, 0)])
def test_steps(mask, kernel, R, K):
    visible = MASKS[mask](R, K)
    pairs = int(mask_of(visible, R, K).sum())
    grad, q, k, v = operands(R, K)
    rest = (*StepChunk.plain(SCALE, visible).arguments(), True, kernel)
    forward = counted(ops.attention_step, q, k, v, None, None, *rest)
    assert forward == pairs * per_pair(1, 1)
    out, lse = torch.zeros(BATCH, HEADS, R, E), torch.zeros(BATCH, HEADS, R)
    for parts, rows, dims in (
        ("dkdv", lse, (2, 2)),  # q k', grad v'; dv, dk
        ("dq", lse, (2, 1)),  # q k', grad v'; dq
        ("all", out, (3, 2)),  # q k', grad v'; dv, dk, dq
    ):
        operator, saved = ops.attention_step_backward, (grad, q, k, v, lse, rows, [])
        assert counted(operator, *saved, parts, *rest) == pairs * per_pair(*dims)


def test_vectors_and_masks_count_as_none():
    q, k, v = (x.to("meta") for x in operands(R, K)[1:])
    upper = torch.ones(R, dtype=torch.int32, device="meta")
    told = StepChunk.plain(SCALE, Visible(keys=(0, 4)), upper).arguments()
    rest = (None, None, *told, True, "triton")
    assert counted(ops.attention_step, q, k, v, *rest) == R * 4 * per_pair(1, 1)
    grad, q, k, v = operands(R, K)
    key_ranges = torch.zeros(1, R, 2, dtype=torch.int32)
    masks = rest_of_local(SCALE, key_ranges=key_ranges)
    out, lse = torch.zeros(BATCH, HEADS, R, E), torch.zeros(BATCH, HEADS, R)
    forward = counted(ops.local_attention, q, k, v, *masks)
    assert forward == R * K * per_pair(1, 1)
    operator = ops.local_attention_backward
    backward = counted(operator, grad, q, k, v, out, lse, *masks, False, None)
    assert backward == R * K * per_pair(3, 2)


def test_what_communicates_is_no_computation():
    """Inductor runs what has a formula on one rank alone, to time it."""
    names = [f"{x}_attention" for x in ("ring", "all_gather")]
    names += [f"{x}_backward" for x in names] + ["ulysses_scatter", "ulysses_gather"]
    assert not [x for x in names if getattr(ops, x) in flop_registry]
