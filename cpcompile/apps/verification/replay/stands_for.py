"""Match values of a rewritten graph with values of the graph before the passes.

A node that a pass has left keeps its name. A node that got the readers of another
stands for it, and so does one that only places a value: on ranks, in a layout, or back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.fx as fx

from cpcompile.passes.graph.nodes import sub_graph
from cpcompile.passes.model.layouts.lay_out_tokens import RELAYOUT
from cpcompile.passes.placement.placement_calls import (
    cp_from_local,
    cp_gather,
    cp_gather_tokens,
    cp_pin,
    cp_place,
    cp_replicate,
    cp_shard,
    cp_to_local,
    cp_unreduced,
    cp_unsplit,
    cp_whole,
)
from cpcompile.passes.rewrites import NodePath, Rewrite

_PLACING = {
    RELAYOUT,
    cp_replicate,
    cp_unreduced,
    cp_shard,
    cp_place,
    cp_pin,
    cp_unsplit,
    cp_whole,
    cp_from_local,
    cp_gather,
    cp_gather_tokens,
    cp_to_local,
}


@dataclass(frozen=True)
class StandIns:
    """For nodes of the rewritten graph, nodes of the untouched one.

    values: those that have the same value. gradients: those that have the same
    gradient: none for a node that got only some of the readers. Shapes may still
    differ: a call that was brought into another form keeps its name.
    """

    values: dict[NodePath, tuple[NodePath, ...]]
    gradients: dict[NodePath, tuple[NodePath, ...]]


def stands_for(rewrite: Rewrite) -> StandIns:
    """Match the nodes of the two graphs."""
    untouched = {place for place, _ in places(rewrite.untouched)}
    written = dict(places(rewrite.rewritten))
    stand_ins = StandIns({}, {})
    for place, node in written.items():
        values = dict.fromkeys(_replaced(place, rewrite.replaced, untouched))
        gradients = {x: None for x in values if x == place or x not in written}
        if node.op == "call_function" and node.target in _PLACING and node.args:
            region, source = place[: len(place) - len(node.name)], node.args[0]
            values |= dict.fromkeys(stand_ins.values.get(f"{region}{source}", ()))
            if isinstance(source, fx.Node) and list(source.users) == [node]:
                sources = stand_ins.gradients.get(f"{region}{source}", ())
                gradients |= dict.fromkeys(sources)
        if values:
            stand_ins.values[place] = tuple(values)
            stand_ins.gradients[place] = tuple(gradients)
    return stand_ins


def places(
    gm: fx.GraphModule, region: NodePath = ""
) -> Iterator[tuple[NodePath, fx.Node]]:
    """Yield all nodes, those of checkpoint regions before the call that runs them."""
    for node in gm.graph.nodes:
        inside = sub_graph(node)
        if inside is not None:
            yield from places(inside, f"{region}{node.name}/")
        yield f"{region}{node.name}", node


def _replaced(
    place: NodePath, replaced: dict[NodePath, set[NodePath]], untouched: set[NodePath]
) -> Iterator[NodePath]:
    """Yield the node itself and all whose readers it got, if they are `untouched`."""
    visited: set[NodePath] = set()
    waiting = [place]
    while waiting:
        path = waiting.pop()
        if path in visited:
            continue
        visited.add(path)
        waiting += sorted(replaced.get(path, ()))
        if path in untouched:
            yield path
