"""Expand to the tokens of a part what is expanded to all, and then split.

    expand = expand(tangents_1, [1, S])
    getitem = getitem(split(expand, S/N, 1), r)
      ->
    expand = expand(tangents_1, [1, S/N])

So comes the gradient of a sum: one number for all tokens, of which a rank takes its
own. `tile_tokens` sees after this that it is one number.

Legend: S tokens of the sequence, N ranks, r this rank.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from ...graph.nodes import value_of
from .tile_program import copied

aten = torch.ops.aten


def expand_parts(graph: fx.Graph) -> None:
    """Replace parts of expanded values, in place."""
    for split in list(graph.nodes):
        if split.target not in (aten.split.Tensor, aten.split_with_sizes.default):
            continue
        source, _, dim = (*split.args, 0)[:3]
        if source.target is not aten.expand.default:
            continue
        number, sizes = source.args[:2]
        dim %= len(sizes)
        own = (1,) * (len(sizes) - value_of(number).dim()) + value_of(number).shape
        if own[dim] != 1:
            continue
        parts = list(split.users)
        if any(isinstance(value_of(x).shape[dim], torch.SymInt) for x in parts):
            continue  # no node has that size, and tiles are of no symbolic size
        for part in parts:
            part_sizes = [*sizes[:dim], value_of(part).shape[dim], *sizes[dim + 1 :]]
            with graph.inserting_before(part):
                args = (number, part_sizes)
                expanded = copied(graph, aten.expand.default, args, {}, source)
            part.replace_all_uses_with(expanded, propagate_meta=False)
            graph.erase_node(part)
        graph.erase_node(split)
