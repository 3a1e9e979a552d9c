"""Fix how DTensor sizes strided shards, gathers shards, and plans, while it is traced.

`x.view(-1, C)` of an activation sharded on the sequence has the placement
_StridedShard, and DTensor works out its local sizes with small index tensors. Under
a fake mode these have no values, so that reading a size from them fails (seen in torch
2.13). Sizes are plain integers: computing them outside of the modes is always right.
A symbolic size would become its value there; where shards are equal but for few entries
(Chunks), it need not.

Gathering a shard makes it contiguous, and pads it first where others are longer.
A call that needs a contiguous operand copies it before. Take two gatherings of one
transposed value, one of them with such a copy. For a full shard they are the same
calls, which AOTAutograd merges; for a padded one they are not (seen in torch 2.13 and
2.15): the ranks would send different messages. Here a shard is contiguous before it is
padded.

To choose a placement DTensor works out what the redistribution of every operand would
cost, and remembers the plan of it, but not while it is traced, because sizes may be
symbols. On a mesh of two axes a plan is a search in a graph, and the same thousand are
made again and again: 16 of 20 seconds that a model of two layers with tensor
parallelism took to compile (torch 2.13). Plans of numbers are remembered here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import Shard, _redistribute
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes

from cpcompile.geometry.divided_lengths import few_more, is_cut_for_all
from cpcompile.geometry.layout import Chunks
from cpcompile.geometry.lengths import is_divided, is_symbol


@functools.cache
def install() -> None:
    """Install the fixes; called before AOTAutograd traces."""
    original_size = _StridedShard.local_shard_size_and_offset
    original_shard = Shard.local_shard_size_and_offset
    original_gather = Shard._to_replicate_tensor

    @functools.wraps(original_shard)
    def size_and_offset(size: Any, ranks: int, rank: Any) -> Any:
        few = few_more(size, ranks)
        if (is_symbol(few) or few) and is_cut_for_all(size, ranks):
            chunks = Chunks(size, ranks)
            return chunks.count(rank), chunks.start(rank)
        return original_shard(size, ranks, rank)

    @functools.wraps(original_size)
    def local_shard_size_and_offset(
        self: Any, size: Any, ranks: int, rank: Any, *args: Any, **kwargs: Any
    ) -> Any:
        with _disable_current_modes():
            if isinstance(size, torch.SymInt):
                pieces = self.split_factor
                chunks = Chunks(size // pieces, ranks)
                if is_divided(size, pieces) and is_cut_for_all(chunks.length, ranks):
                    return pieces * chunks.count(rank), chunks.start(rank)
            return original_size(self, size, ranks, rank, *args, **kwargs)

    @functools.wraps(original_gather)
    def to_replicate_tensor(self: Any, local: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original_gather(self, local.contiguous(), *args, **kwargs)

    _StridedShard.local_shard_size_and_offset = local_shard_size_and_offset  # type: ignore[method-assign, assignment]
    Shard.local_shard_size_and_offset = staticmethod(size_and_offset)  # type: ignore[method-assign, assignment]
    Shard._to_replicate_tensor = to_replicate_tensor  # type: ignore[method-assign, assignment]


@contextmanager
def plans_are_kept() -> Iterator[None]:
    """Make plans of specifications without symbols once, inside; may be nested."""
    with mock.patch.object(_redistribute, "_gen_transform_infos_non_cached", _plan):
        yield


_make = _redistribute._gen_transform_infos_non_cached
_kept: Any = functools.lru_cache(maxsize=1 << 16)(_make)


@functools.wraps(_make)
def _plan(*args: Any, **kwargs: Any) -> Any:
    try:
        return _kept(*args, **kwargs)
    except TypeError:  # specifications with symbols have no hash
        return _make(*args, **kwargs)
