"""The placements of the fields of a mask, where q, k and v are split in some way.

On the mesh axis of the sequence q, k and v are Shard(2), and so is a bias of pairs,
whose rows are those of q; key ranges, segment ids and a bias of positions are
replicated. On other axes q, k and v are replicated or split on batch or heads, and a
mask is split alike where it has the dimension. Where it has not, ranks that hold other
parts of the batch, or other heads, read the same mask: the gradient of a bias is
Partial there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

SEQUENCE = Shard(2)
BIAS_DIMS = 4
# Which dimensions of q are which of what has values for heads.
OF_HEADS = {"seeds": {0: 0, 1: 1}, "sinks": {1: 0}}


def mask_placements(
    name: str, placements: Sequence[Placement], shape: Any
) -> list[Placement]:
    """Return the placements of a field of a mask, where q, k and v have `placements`.

    Fields are [B or 1, ...]; a bias alone has heads, [B or 1, H or 1, rows, keys], or
    without rows. Seeds are [B, H], and sinks [H].
    """
    if name in OF_HEADS:
        dims = OF_HEADS[name]
        return [
            Shard(dims[x.dim])
            if isinstance(x, Shard) and x.dim in dims
            else Replicate()
            for x in placements
        ]

    def of(placement: Placement) -> Placement:
        if not isinstance(placement, Shard):
            return placement
        if placement == SEQUENCE:
            return SEQUENCE if len(shape) == BIAS_DIMS else Replicate()
        has_it = placement.dim == 0 or name == "bias"
        return placement if has_it and shape[placement.dim] > 1 else Replicate()

    return [of(placement) for placement in placements]


def gradient_placements(
    placements: Sequence[Placement], of_bias: Sequence[Placement]
) -> list[Placement]:
    """Return the placements of a bias gradient, where q, k and v have `placements`."""
    return [
        Partial() if isinstance(q, Shard) and isinstance(bias, Replicate) else bias
        for q, bias in zip(placements, of_bias, strict=True)
    ]
