"""Transposed convolutions of sharded tokens: each rank makes results of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cpcompile.ops.dtensor.local_part import dtensor_of, local_part
from cpcompile.ops.dtensor.padded_convolution import whole_weight
from cpcompile.ops.dtensor.shares import sharing_rows

_CONVOLUTIONS = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def transposed_convolution(
    input: DTensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
    dim: int,
) -> DTensor:
    """Run F.conv_transpose1d, 2d or 3d without what it gives after the last token.

    Token i gives results from i * stride on, and adds to those of later tokens, so that
    a rank borrows tokens before its own.

    Args:
        input: [B, C, ..] or [C, ..], sharded along `dim` in even parts, by one axis,
            and perhaps along the batch; weight and bias are whole.
        stride, .., dilation: as torch takes them; along `dim` nothing is padded.
        dim: the dimension of the tokens.

    Returns: [.., tokens * stride, ..] along `dim`.

    Raises: ValueError for other placements, uneven parts or padding.
    """
    first = input.ndim - len(stride)
    i, axis = dim - first, input.placements.index(Shard(dim))
    mesh, local = input.device_mesh, local_part(input)
    batch = all(
        p.is_replicate() or p == Shard(dim) or (p.is_shard(0) and first == 2)
        for p in input.placements
    )
    even = input.shape[dim] % mesh.size(axis) == 0
    if not batch or not even or padding[i] or output_padding[i]:
        raise ValueError(
            f"a transposed convolution of a DTensor {tuple(input.shape)} with "
            f"placements {input.placements} and padding {tuple(padding)}; needed even "
            f"parts along dim {dim}, and no padding there"
        )
    taps, step = weight.shape[2 + i], stride[i]
    borrowed = max(0, -(-(dilation[i] * (taps - 1) + 1) // step) - 1)
    shared = sharing_rows(mesh, input.placements, input.numel(), local.numel())
    own, tokens = local.shape[dim], input.shape[dim]
    if borrowed:
        group = mesh.get_group(axis).group_name
        local = torch.ops.cp.halo_exchange(local, dim, tokens, borrowed, 0, group)
    grads: list[Placement] = [
        Replicate() if p.is_replicate() else Partial() for p in input.placements
    ]
    with shared:
        out = _CONVOLUTIONS[len(stride)](
            local,
            whole_weight(weight, grads),
            None if bias is None else whole_weight(bias, grads),
            list(stride),
            list(padding),
            list(output_padding),
            groups,
            list(dilation),
        )
    missing = own * step + borrowed * step - out.shape[dim]
    if missing > 0:  # windows that do not touch, such as stride 3 with 2 taps
        raise ValueError(
            f"a transposed convolution with {taps} taps and stride {step}; needed a "
            "result of every step"
        )
    out = out.narrow(dim, borrowed * step, own * step).contiguous()
    sizes = list(input.shape)
    sizes[:first] = [*input.shape[: first - 1], weight.shape[1] * groups]
    sizes[first:] = out.shape[first:]
    sizes[dim] = tokens * step
    shape = torch.Size(sizes)
    return dtensor_of(out, mesh, input.placements, shape)
