"""Cut a sequence into windows, of which every rank has whole ones, and join them.

    x: [B, 61, D] S(1) on 2 ranks, 31 and 30 tokens
    view(x[:, :60], (B, 15, 4, D))
      ->
    padded = cp_move_tokens(x[:, :60], 1, 'pad', 0, 4)    64 tokens, 32 and 32
    view(padded, (B, 16, 4, D))[:, :15]                   8 and 7 windows of 4

Patches, rows of images, frames of videos and blocks of tokens are such windows. torch
deals windows out as it deals tokens, so that a rank borrows few tokens from neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.fx as fx

from cpcompile.geometry.layout import leaves_ranks_empty
from cpcompile.geometry.lengths import is_symbol

from ...graph.calls import canonical_call
from ...graph.new_call import NewCall
from ...graph.nodes import fake_value
from ...placement.decisions import Propagate, Replace
from ...placement.graph_values import GraphValues
from ...placement.placement_calls import cp_exchange
from .move_rules import move_tokens, split_dim


def window_view(known: GraphValues, node: fx.Node) -> Replace | None:
    """Decide on a view that makes windows of uneven parts of tokens, or joins them."""
    source = canonical_call(node).arguments["input"]
    call = in_windows(known, source, fake_value(node).shape)
    return None if call is None else Replace(call)


def in_windows(
    known: GraphValues, source: fx.Node, after: Sequence[int]
) -> NewCall | None:
    """Return the view of a value in another shape that cuts or joins windows.

    One sample's rows of windows become windows of the batch, and rows again: leading
    dimensions of one entry are left out, and added, by the same view.

    None if DTensor makes it, or if it is another view.
    """
    dim = split_dim(known, source)
    if dim is None:
        return None
    shapes = fake_value(source).shape, after
    if any(is_symbol(n) for shape in shapes for n in shape):
        return None
    before, after = ([int(n) for n in shape] for shape in shapes)  # guards fix some
    left_out, added = _leading_ones(before[:dim]), _leading_ones(after)
    inner = before[left_out:], after[added:], dim - left_out
    size = windows(*inner)
    joins = size is None
    size = windows(inner[1], inner[0], inner[2]) if joins else size
    if size is None:
        return None
    at = inner[2] + added  # of the result
    ranks, count = known.ctx.ranks, before[dim] if joins else after[at]
    if count % ranks == 0 or leaves_ranks_empty(count, ranks):
        return None  # DTensor does the former; views of no windows at all fail
    even = ranks * -(-count // ranks)
    more = (even - count) * (1 if joins else size)
    padded = move_tokens(known, [source], dim, "pad", 0, more, "constant", fill=0.0)
    shape = [*after[:at], even * (size if joins else 1), *after[at + 1 :]]
    view = NewCall(torch.reshape, (padded, shape))
    return move_tokens(known, [view], at, "slice", None, after[at], 1)


def _leading_ones(shape: Sequence[int]) -> int:
    return next((at for at, n in enumerate(shape) if n != 1), len(shape))


def windows_flattened(known: GraphValues, node: fx.Node) -> Propagate | None:
    """Decide on a view that flattens uneven rows of windows with other dimensions.

        x: [B, 3, W, 7, 7, C] S(1) on 2 ranks, 2 and 1 rows of windows
        reshape(x, (B * 3 * W, 49, C))
          ->
        cp_exchange(x, 1, 0), and so S(0) of samples with all of their windows

    Of a flattened dimension torch's parts are even, and no rank has them: the windows
    are shared out along another dimension that is flattened, and divided evenly.
    """
    source = canonical_call(node).arguments["input"]
    dim = split_dim(known, source)
    if dim is None:
        return None
    shapes = fake_value(source).shape, fake_value(node).shape
    if any(is_symbol(n) for shape in shapes for n in shape):
        return None
    before, after = ([int(n) for n in shape] for shape in shapes)  # guards fix some
    ranks = known.ctx.ranks
    split = {getattr(p, "dim", None) for p in known.value(source).placements}
    group = _flattened_with(before, after, dim)
    others = [x for x in group if before[x] % ranks == 0 and x not in split]
    if before[dim] % ranks == 0 or not others:
        return None
    if max(group) < dim:
        return None  # tokens behind samples, which losses read as they are
    exchanged = NewCall(cp_exchange, (source, known.cp_axis, dim, others[0]))
    return Propagate(NewCall(torch.reshape, (exchanged, after)))


def _flattened_with(before: list[int], after: list[int], dim: int) -> list[int]:
    """Return the dimensions that a view, at least in part, makes one with `dim`."""
    starts = [prod(after[:at]) for at in range(len(after) + 1)]
    first, behind = prod(before[:dim]), prod(before[: dim + 1])
    at = next((x for x, n in enumerate(starts[1:]) if n >= behind), None)
    if at is None or starts[at] > first:
        return []
    return [
        x
        for x in range(len(before))
        if x != dim
        and prod(before[:x]) < starts[at + 1]
        and prod(before[: x + 1]) > starts[at]
    ]


def windows(before: Sequence[int], after: Sequence[int], dim: int) -> int | None:
    """Return how many tokens a window has if a view cuts dimension `dim` into such.

    The windows are dimension `dim` of the result, and what is in one of them is behind
    it, in whatever shape. None for any other view.
    """
    if list(before[:dim]) != list(after[:dim]) or len(after) <= dim + 1:
        return None
    if not after[dim] or before[dim] % after[dim]:
        return None
    size = before[dim] // after[dim]
    return size if size > 1 else None
