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

from cpcompile.cost.mixer_plan import MixerStrategy

from ...graph.calls import spelled
from ...graph.nodes import fake_value
from ..layouts.layout_cut import LayoutCut
from ..sharding.dim_flows import dim_flows
from .dim_class import CREATIONS, DimClass
from .mixed_sequence import MixedSequence, moves_little, stays_on_tokens
from .mixer_seconds import DEAR, MixerSeconds, bytes_of, has_strategies


@dataclass(frozen=True)
class Region:
    """Calls that are computed in parts along another dimension than the tokens.

    saved: seconds, in comparison with the side of the tokens. first: where it begins.
    """

    entries: DimClass
    moved: set[fx.Node]
    saved: float
    first: int


class RegionFinder:
    """The minimum cut of a graph, for one dimension after the other.

    forced: the strategy that the user named.
    """

    def __init__(
        self,
        sequence: MixedSequence,
        seconds: MixerSeconds,
        forced: MixerStrategy | None,
    ) -> None:
        self._sequence, self._seconds, self._forced = sequence, seconds, forced

    def find(self, entries: DimClass) -> Iterator[Region]:
        """Yield the parts of the graph that are cheaper on the side of `entries`."""
        nodes = [x for x in self._sequence.nodes if self._takes_part(x, entries)]
        members = set(nodes)
        prices = {x: self._price(x, entries) for x in nodes}
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
        while moved:
            start = min(moved, key=order.__getitem__)
            region, waiting = set(), [start]
            while waiting:
                node = waiting.pop()
                if node in moved:
                    moved.remove(node)
                    region.add(node)
                    waiting += neighbours[node]
            around = {x for node in region for x in (node, *neighbours[node])}
            price = math.fsum(
                exchanges[x] or 0.0
                for x in around
                if any((user in region) != (x in region) for user in x.users)
            )
            saved = math.fsum(
                (prices[x][0] or 0.0) - (prices[x][1] or 0.0) for x in region
            )
            saved -= price
            mixing = filter(self._sequence.mixes, region)
            if self._seconds.is_laid_out and all(map(moves_little, mixing)):
                saved -= price  # in a layout moves are as cheap, an exchange is not
            if saved > 0:
                yield Region(entries, region, saved, order[start])

    def _takes_part(self, node: fx.Node, entries: DimClass) -> bool:
        """Tell whether a call or input is on a side at all."""
        if node.op == "output" or node not in self._sequence.computed:
            return False
        values = (node, *node.all_input_nodes)
        return any(x in entries.dims for x in values)

    def _price(
        self, node: fx.Node, entries: DimClass
    ) -> tuple[float | None, float | None]:
        """Return the seconds of a call on either side; None where it must not be."""
        if node.op == "placeholder":
            return 0.0, (None if node not in self._sequence.links else 0.0)
        if self._sequence.is_written(node) or self._writes_elsewhere(node, entries):
            return 0.0, None
        operands = self._sequence.computed.intersection(node.all_input_nodes)
        local = not operands or (
            entries.is_local(node) and self._reads_entries(node, entries)
        )
        gathered = self._gathered(node, entries)
        local &= not any(self._sequence.is_written(x) for x in gathered)
        moved = 0.0 if local and not stays_on_tokens(node) else None
        if moved is not None:
            moved = self._seconds.in_uneven_parts(node, entries)
            moved += self._seconds.of_gather(gathered)
        if self._sequence.borrowed(node) is not None:
            return self._price_of_convolution(node, moved)
        in_full = self._seconds.in_full(node)
        if not self._sequence.mixes(node):
            operands = {x for x in operands if isinstance(fake_value(x), Tensor)}
            if not operands or any(x in self._sequence.tokens.dims for x in operands):
                return 0.0, moved
            if self._sequence.is_shared_in_others(node):
                return 0.0, moved
            of_others = any(map(self._sequence.is_of_others, operands))
            if of_others and moves_little(node):
                return self._seconds.of_move(node), moved
            if of_others and self._forced is MixerStrategy.EXCHANGE:
                return DEAR, moved
            if dim_flows(node):  # cut again where it is shorter, and gathered again
                in_full += self._seconds.of_gather(operands)
            elif of_others:  # all but the largest, along which DTensor shards it
                by_size = sorted(operands, key=lambda x: (bytes_of(x), x))
                in_full += self._seconds.of_gather(by_size[:-1])
            return in_full, moved
        if moves_little(node):
            return self._seconds.of_move(node), moved
        forced = self._forced
        rules_out = forced is MixerStrategy.GATHER or (
            forced is MixerStrategy.STATES
            and has_strategies(node)
            and self._seconds.of_states(node) is not None
        )
        if rules_out and moved is not None:
            moved = DEAR
        if has_strategies(node):
            return self._seconds.on_tokens(node)[0], moved
        with_tokens = [
            x for x in node.all_input_nodes if x in self._sequence.tokens.dims
        ]
        in_parts = self._seconds.of_gather(with_tokens) + in_full
        return DEAR if forced is MixerStrategy.EXCHANGE else in_parts, moved

    def _price_of_convolution(
        self, node: fx.Node, moved: float | None
    ) -> tuple[float | None, float | None]:
        """Return the seconds of a convolution that reads tokens of other ranks."""
        if self._sequence.mixes(node):
            if self._forced is MixerStrategy.EXCHANGE:
                return DEAR, moved
            if self._forced is MixerStrategy.GATHER and moved is not None:
                moved = DEAR
        return self._seconds.of_halo(node), moved

    def _reads_entries(self, node: fx.Node, entries: DimClass) -> bool:
        """Tell whether a call reads a value of which ranks have entries, or makes one.

        Weights that are cut share nothing out: every rank has all of them.
        """
        made = (node, *node.all_input_nodes)
        if any(spelled(x) in CREATIONS and x in entries.dims for x in made):
            return True
        return any(
            x in entries.dims or not isinstance(fake_value(x), Tensor)
            for x in self._sequence.computed.intersection(node.all_input_nodes)
        )

    def _writes_elsewhere(self, node: fx.Node, entries: DimClass) -> bool:
        """Tell whether a call writes into a tensor that has no side."""
        base = node.args[0] if spelled(node) == "setitem" else None
        return isinstance(base, fx.Node) and not self._takes_part(base, entries)

    def _gathered(self, node: fx.Node, entries: DimClass) -> list[fx.Node]:
        """Return the operands that ranks must have in whole on the side of `entries`.

        All of its entries read them, and they are split along the tokens.
        """
        if spelled(node) in CREATIONS:
            return []
        return [
            x
            for x in node.all_input_nodes
            if x in self._sequence.tokens.dims
            and x in self._sequence.computed
            and x not in entries.dims
        ]


def _is_read_outside(node: fx.Node, members: set[fx.Node]) -> bool:
    """Tell whether a call that has no side reads a value, or it leaves the graph."""
    return any(
        user not in members
        and spelled(user) not in CREATIONS
        and (user.op == "output" or isinstance(fake_value(user), Tensor))
        for user in node.users
    )
