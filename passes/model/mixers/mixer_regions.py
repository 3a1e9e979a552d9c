"""Find the parts of a graph that are cheaper along another dimension than the tokens.

Note [Exchanged or not]
For one dimension, every call is on one of two sides: its values are split along the
tokens, or along that dimension. A value that a call of the other side reads costs an
all-to-all; a call that mixes tokens costs a gather and the work of all ranks on the
side of the tokens, and cannot be on the other side unless `flow` proves that entries
keep apart. The cheapest choice is a minimum cut, as for layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.fx as fx
from torch import Tensor

from ...graph.calls import spelled
from ...graph.nodes import fake_value, reached
from ..layouts.layout_cut import LayoutCut
from ..tokens.dim_group import CREATIONS, DimGroup
from ..tokens.mixed_sequence import MixedSequence, moves_little
from .mixer_seconds import MixerSeconds


@dataclass(frozen=True)
class Region:
    """Calls that are computed in parts along another dimension than the tokens.

    saved: seconds, in comparison with the side of the tokens. first: where it begins.
    """

    entries: DimGroup
    moved: set[fx.Node]
    saved: float
    first: int


class RegionFinder:
    """The minimum cut of a graph, for one dimension after the other."""

    def __init__(self, sequence: MixedSequence, seconds: MixerSeconds) -> None:
        self._sequence, self._seconds = sequence, seconds

    def find(self, entries: DimGroup) -> Iterator[Region]:
        """Yield the parts of the graph that are cheaper on the side of `entries`."""
        nodes = [x for x in self._sequence.nodes if self._takes_part(x, entries)]
        members = set(nodes)
        prices = {x: self._prices(x, entries) for x in nodes}
        exchanges = {x: self._seconds.of_exchange(x, entries) for x in nodes}
        cut = LayoutCut()
        neighbours: dict[fx.Node, list[fx.Node]] = {x: [] for x in nodes}
        for node in nodes:
            cut.add(node, *prices[node])
            same = [x for x in self._sequence.links.get(node, ()) if x in members]
            users = [x for x in node.users if x in members]
            if spelled(node) == "setitem":
                same += [x for x in (node.args[0],) if x in members]
            elif not isinstance(fake_value(node), Tensor):
                same += users
            else:
                outside: list[Any] = []
                if _is_read_outside(node, members):
                    outside.append((node, "outside"))
                    cut.add(outside[0], 0.0, None)
                cut.feed(node, [*users, *outside], (node, "value"), exchanges[node])
            for other in same:
                cut.same(node, other)
            for other in (*same, *users):
                neighbours[node].append(other)
                neighbours[other].append(node)
        moved = {x for x in cut.solve() if isinstance(x, fx.Node)}
        order = {x: i for i, x in enumerate(nodes)}

        def beside(node: fx.Node) -> list[fx.Node]:
            return [x for x in neighbours[node] if x in moved]

        while moved:
            start = min(moved, key=order.__getitem__)
            region = {*reached([start], beside)}
            moved -= region
            around = {x for node in region for x in (node, *neighbours[node])}
            price = math.fsum(
                exchanges[x] or 0.0
                for x in around
                if any((user in region) != (x in region) for user in x.users)
            )
            saved = math.fsum(prices[x][0] - (prices[x][1] or 0.0) for x in region)
            saved -= price
            mixing = filter(self._sequence.mixes, region)
            if self._seconds.is_laid_out and all(map(moves_little, mixing)):
                saved -= price  # in a layout moves are as cheap, an exchange is not
            if saved > 0:
                yield Region(entries, region, saved, order[start])

    def _takes_part(self, node: fx.Node, entries: DimGroup) -> bool:
        """Tell whether a call or input is on a side at all."""
        if node.op == "output" or node not in self._sequence.computed:
            return False
        values = (node, *node.all_input_nodes)
        return any(x in entries.dims for x in values)

    def _prices(self, node: fx.Node, entries: DimGroup) -> tuple[float, float | None]:
        """Return the seconds of a call on the side of the tokens, and of `entries`.

        What cannot be on the side of `entries` is on the other at any price.
        """
        if self._writes_elsewhere(node, entries):
            return 0.0, None
        on_entries = self._seconds.on_entries(node, entries)
        return 0.0 if on_entries is None else self._seconds.on_tokens(node), on_entries

    def _writes_elsewhere(self, node: fx.Node, entries: DimGroup) -> bool:
        """Tell whether a call writes into a tensor that has no side."""
        base = node.args[0] if spelled(node) == "setitem" else None
        return isinstance(base, fx.Node) and not self._takes_part(base, entries)


def _is_read_outside(node: fx.Node, members: set[fx.Node]) -> bool:
    """Tell whether a call that has no side reads a value, or it leaves the graph."""
    return any(
        user not in members
        and spelled(user) not in CREATIONS
        and (user.op == "output" or isinstance(fake_value(user), Tensor))
        for user in node.users
    )
