"""Views of a dimension whose shards are uneven before them, or after.

    x [B, 36, C] of 18 tokens per rank -> view [B, 9, 4, C] of 5 and 4 windows
      ->
    pad [B, 40, C] -> view [B, 10, 4, C] -> slice [B, 9, 4, C]

DTensor views even shards only. Padding and slice move the tokens that change their
rank (sequence_moves).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from cpcompile.geometry.lengths import hashable, is_same, is_symbol

from ..graph.constant_arguments import MeshAxis
from ..placement.token_moves import are_few, cp_part_rows
from .sequence_moves import move_rules

aten = torch.ops.aten


def viewed(
    x: DTensor, sizes: Sequence[Any], cp_axis: MeshAxis, lengths: Collection[Any]
) -> Any:
    """Return aten.view(x, sizes) for a shard of tokens that has the order of memory.

    lengths: of sequences.
    """
    sizes = list(sizes)
    if -1 in sizes:
        known = math.prod(n for n in sizes if n != -1)
        sizes[sizes.index(-1)] = math.prod(x.shape) // known
    rows = _rows_of_batch(x, sizes, cp_axis, lengths)
    if rows is not None:
        return aten.view.default(rows, sizes)
    found = _of_shard(x, sizes, cp_axis)
    if found is None:
        return aten.view.default(x, sizes)
    (dim, joined), (target, parts) = found
    flat = [*x.shape[:dim], math.prod(joined), *x.shape[dim + len(joined) :]]
    if len(joined) > 1:
        x = _padded(x, dim, joined[0], cp_axis)
        padded = [*flat[:dim], x.shape[dim] * math.prod(joined[1:]), *flat[dim + 1 :]]
        x = _first(aten.view.default(x, padded), dim, flat[dim], cp_axis)
    if len(parts) == 1:
        return aten.view.default(x, sizes)
    x = _padded(x, dim, parts[0], cp_axis, math.prod(parts[1:]))
    windows = x.shape[dim] // math.prod(parts[1:])
    padded = [*sizes[:target], windows, *sizes[target + 1 :]]
    return _first(aten.view.default(x, padded), target, parts[0], cp_axis)


def _rows_of_batch(
    x: DTensor, sizes: list[Any], cp_axis: MeshAxis, lengths: Collection[Any]
) -> DTensor | None:
    """Return rows, of which each rank has a piece, [.., batch, tokens, ..] by tokens.

    None if x is viewed as something else.
    """
    p = x.placements[cp_axis.axis]
    if type(p) is not Shard or sum(y.is_shard() for y in x.placements) != 1:
        return None
    pairs = joined_dims(list(x.shape), sizes)
    parts = next((b for a, b in pairs if a == [p.dim]), [])
    of_batch = parts[1:2] if len(parts) == 2 else []
    if not any(hashable(sizes[d]) in lengths for d in of_batch) or is_symbol(
        x.shape[p.dim]
    ):
        return None
    return cp_part_rows(x, cp_axis, p.dim, sizes[parts[0]])


def _of_shard(
    x: DTensor, sizes: list[Any], cp_axis: MeshAxis
) -> tuple[tuple[int, list[Any]], tuple[int, list[Any]]] | None:
    """Return what becomes of the dimension that is cut, if its parts are uneven.

    Its place and the sizes of those that it is joined with; the same of the result.
    """
    p, ranks = x.placements[cp_axis.axis], cp_axis.size
    if type(p) is not Shard or sum(y.is_shard() for y in x.placements) != 1:
        return None
    pairs = joined_dims(list(x.shape), sizes)
    found = next(((a, b) for a, b in pairs if p.dim in a), None)
    if found is None or found[0][0] != p.dim:
        return None
    made = [d for d in found[1] if not is_same(sizes[d], 1)] or found[1]
    dim, target = found[0][0], made[0]
    joined, parts = [x.shape[d] for d in found[0]], [sizes[d] for d in made]
    uneven = [len(n) > 1 and n[0] % ranks != 0 for n in (joined, parts)]
    if not any(uneven) or are_few(joined[0], ranks) or are_few(parts[0], ranks):
        return None
    return (dim, joined), (target, parts)


def joined_dims(
    sizes: list[Any], others: list[Any]
) -> list[tuple[list[int], list[int]]]:
    """Return the fewest dimensions that a view makes of others, from left to right."""
    pairs: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(sizes) and j < len(others):
        a, b = [i], [j]
        i, j = i + 1, j + 1
        while not is_same(
            n := math.prod(sizes[d] for d in a), m := math.prod(others[d] for d in b)
        ):
            if n < m and i < len(sizes):
                a.append(i)
                i += 1
            elif n > m and j < len(others):
                b.append(j)
                j += 1
            else:
                return []
        pairs.append((a, b))
    return pairs


def _padded(x: Any, dim: int, count: Any, cp_axis: MeshAxis, each: Any = 1) -> Any:
    """Pad `count` times `each` entries to a multiple for the ranks."""
    more = -count % cp_axis.size * each
    pad = [0, 0] * (x.ndim - 1 - dim) + [0, more]
    call = aten.constant_pad_nd.default
    return move_rules(cp_axis)[call](x, pad) if more else x


def _first(x: Any, dim: int, count: Any, cp_axis: MeshAxis) -> Any:
    if is_same(x.shape[dim], count):
        return x
    return move_rules(cp_axis)[aten.slice.Tensor](x, dim, 0, count)
