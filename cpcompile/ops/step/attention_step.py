"""cp::attention_step: local queries meet one chunk of keys.

A ring is made of these; so is attention on gathered keys, which is one step. Every step
takes the running result of the earlier ones and returns the new one, so that nothing is
left to merge. Which keys a row sees arrives as integers, see geometry.visibility, or
as int32 vectors. Legend as in block_attention.py.

`after` sets the order: it is a tensor, as of a message in flight, that has to exist
before the step starts. Its values are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cpcompile.geometry.blocks import Block, square
from cpcompile.geometry.visibility import Visible
from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.step.aten_flash import is_empty
from cpcompile.ops.step.block_attention import (
    block_attention,
    take_keys,
    take_rows,
)
from cpcompile.ops.step.math_attention import accumulation_dtype, additive, math_forward
from cpcompile.ops.step.online_softmax import RunningAttention


@torch.library.custom_op("cp::attention_step", mutates_args=())
def attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    upper_rows: Tensor | None,
    lower_rows: Tensor | None,
    rows: Sequence[int],
    keys: Sequence[int],
    upper: Sequence[int],
    lower: Sequence[int],
    scale: float,
    final: bool,
    kernel: str,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from q to one chunk of keys, and add that to the running (out, lse).

    Args:
        q: [B, H, R, D]; k: [B, G, K, D]; v: [B, G, K, E].
        out, lse: [B, H, R, E] and [B, H, R] of the earlier steps, in the accumulation
            dtype (float32; float64 for float64); None before the first one.
        upper_rows, lower_rows: int32 [R], never decreasing: row i sees the keys
            lower_rows[i] <= j < upper_rows[i]; instead of `upper` and `lower`.
        rows, keys, upper, lower: the fields of Visible, [] for no limit.
        scale: factor of the scores.
        final: return out in q's dtype, as the last step does.
        kernel: value of the StepKernel to use.
        after: see above.

    Returns: out and lse like the arguments. lse is the natural log-sum-exp of the
    scaled scores; rows that have seen no key yet have 0 and -inf.

    Raises: ValueError for limits that are not [] or two integers.
    """
    visible = Visible.of_lists(rows, keys, upper, lower)
    which = StepKernel(kernel)
    if which is StepKernel.TEMPLATE:
        from cpcompile.kernels import launch  # imports triton

        return launch.forward(
            q, k, v, out, lse, upper_rows, lower_rows, visible, scale, final
        )
    running = RunningAttention(q, v.shape[-1], out, lse)
    blocks = blocks_of(q, k, upper_rows, lower_rows, visible, which)
    if blocks is None:
        hidden = hidden_keys(q, k, upper_rows, lower_rows, visible)
        whole = Block(0, q.shape[2], 0, k.shape[2], False)
        running.merge(whole, *math_forward(q, k, v, additive(hidden, q), scale))
        return running.result(final)
    for block in blocks:
        part = block_attention(
            take_rows(q, block),
            take_keys(k, block),
            take_keys(v, block),
            block.triangular,
            scale,
            which,
        )
        running.merge(block, *part)
    return running.result(final)


@attention_step.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, out: Any, lse: Any, *rest: Any
) -> tuple[Tensor, Tensor]:
    final = rest[7]
    dtype = accumulation_dtype(q.dtype)
    shape = (*q.shape[:-1], v.shape[-1])
    return (
        q.new_empty(shape, dtype=q.dtype if final else dtype),
        q.new_empty(q.shape[:-1], dtype=dtype),
    )


def hidden_keys(
    q: Tensor,
    k: Tensor,
    upper_rows: Tensor | None,
    lower_rows: Tensor | None,
    visible: Visible,
) -> Tensor | None:
    """Return which keys a row does not see, bool [R, K]; None if every row sees all."""
    R, K = q.shape[2], k.shape[2]
    row = torch.arange(R, device=q.device).unsqueeze(1)
    key = torch.arange(K, device=q.device)
    hidden = []
    if visible.rows is not None:
        hidden.append((row < visible.rows[0]) | (row >= visible.rows[1]))
    if visible.keys is not None:
        hidden.append((key < visible.keys[0]) | (key >= visible.keys[1]))
    if upper_rows is not None:
        hidden.append(key >= upper_rows.unsqueeze(1))
    elif visible.upper is not None:
        even, odd = visible.upper
        hidden.append(key >= row + torch.where(row % 2 == 0, even, odd))
    if lower_rows is not None:
        hidden.append(key < lower_rows.unsqueeze(1))
    elif visible.lower is not None:
        even, odd = visible.lower
        hidden.append(key < row + torch.where(row % 2 == 0, even, odd))
    if not hidden:
        return None
    mask = torch.zeros(R, K, dtype=torch.bool, device=q.device)
    for each in hidden:
        mask |= each
    return mask


def blocks_of(
    q: Tensor,
    k: Tensor,
    upper_rows: Tensor | None,
    lower_rows: Tensor | None,
    visible: Visible,
    kernel: StepKernel,
) -> tuple[Block, ...] | None:
    """Return the blocks for aten's kernels to compute, or None if it takes a mask."""
    if visible.is_empty or is_empty(q, k):
        return ()
    if upper_rows is not None or lower_rows is not None:
        return None
    blocks = visible.blocks(q.shape[2], k.shape[2])
    if blocks is None or kernel is StepKernel.MATH or q.device.type == "cpu":
        return blocks
    return tuple(part for block in blocks for part in square(block))
