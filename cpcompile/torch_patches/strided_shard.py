"""Lets DTensor shard a flattened [batch, sequence] dimension while it is being traced.

`x.view(-1, C)` of an activation sharded on the sequence has the placement
_StridedShard, and DTensor works out its local sizes with small index tensors. Under
a fake mode these have no values, so that reading a size from them fails (seen in torch
2.13). Sizes are plain integers: computing them outside of the modes is always right.
A symbolic size would become its value there; where all shards are equal, it need not.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes

from cpcompile.geometry.lengths import is_divided


@functools.cache
def install() -> None:
    """Compute the sizes of strided shards outside of any fake or tracing mode."""
    original = _StridedShard.local_shard_size_and_offset

    @functools.wraps(original)
    def local_shard_size_and_offset(
        self: Any, size: Any, ranks: int, rank: Any, *args: Any, **kwargs: Any
    ) -> Any:
        with _disable_current_modes():
            if isinstance(size, torch.SymInt):
                pieces = self.split_factor
                piece = size // pieces
                if is_divided(size, pieces) and is_divided(piece, ranks):
                    return pieces * (piece // ranks), rank * (piece // ranks)
            return original(self, size, ranks, rank, *args, **kwargs)

    _StridedShard.local_shard_size_and_offset = local_shard_size_and_offset  # type: ignore[method-assign, assignment]
