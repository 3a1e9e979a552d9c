"""Find regions of a joint graph that can run for some tokens after others.

    h [S, D] -> logits [S, V] -> loss        dh [S, D], dW [V, D] <- dlogits [S, V]

A region is everything that makes or reads the large values of one place, forward and
backward, if all of it is token-wise. What enters and leaves it is small against them,
or a sum over tokens, so that large values exist only for the tokens of one tile.

Legend: S tokens of this rank, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.fx as fx
from torch import Tensor

from ...flow.dim_maps import SUM, Axes, DimMap, TokenSum
from ...flow.dim_rules import dim_map
from ...graph.nodes import reached, value_of
from ...graph.sequence_tokens import TokenAxis


def elements_of(node: fx.Node) -> int:
    """Return the number of elements of the tensor that a node makes.

    It is 0 for anything else, and for a symbolic size: to ask how large a symbol is
    would fix it.
    """
    return value_of(node).numel() if _has_sizes(node) else 0


def bytes_of(node: fx.Node) -> int:
    """Return the bytes of the tensor that a node makes; 0 where `elements_of` is 0."""
    count = elements_of(node)
    return count * value_of(node).element_size() if count else 0


def is_view(node: fx.Node) -> bool:
    """Tell whether a call returns memory of an operand."""
    memory = value_of(node).untyped_storage()._cdata
    operands = map(value_of, node.all_input_nodes)
    return any(
        x.untyped_storage()._cdata == memory for x in operands if isinstance(x, Tensor)
    )


class TileMaps:
    """The dimensions of the calls of a graph that may run on some tokens after others.

    Answers are remembered, as the graph does not change meanwhile.
    """

    def __init__(self) -> None:
        self._maps: dict[fx.Node, DimMap | None] = {}

    def before(self, node: fx.Node, axis: TokenAxis, tokens: int) -> Axes | None:
        """Return the operands' axes of a token-wise call whose result has `axis`."""
        call_map = self._of(node)
        return None if call_map is None else call_map.before(node, axis, tokens)

    def after(
        self, node: fx.Node, axes: Mapping[fx.Node, TokenAxis], tokens: int
    ) -> tuple[TokenAxis | TokenSum, Axes] | None:
        """Return the axes of the result and of all operands, from known ones."""
        call_map = self._of(node)
        return None if call_map is None else call_map.after(node, axes, tokens)

    def _of(self, node: fx.Node) -> DimMap | None:
        if node not in self._maps:
            every = (node, *node.all_input_nodes)
            is_call = isinstance(node.target, torch._ops.OpOverload)
            call_map = (
                dim_map(node) if is_call and all(map(_has_sizes, every)) else None
            )
            self._maps[node] = (
                None if call_map is not None and call_map.draws else call_map
            )
        return self._maps[node]


def _has_sizes(node: fx.Node) -> bool:
    """Tell whether a node makes a tensor without symbols.

    To compare symbols would fix them.
    """
    value = value_of(node)
    return isinstance(value, Tensor) and all(isinstance(n, int) for n in value.shape)


@dataclass(frozen=True)
class JointFacts:
    """Facts about a joint graph in addition to its calls.

    backward: nodes that depend on gradients of results.
    fixed: nodes that depend on no token: parameters, and what follows from parameters
    alone.
    maps: the dimensions of its calls.
    """

    backward: frozenset[fx.Node]
    fixed: frozenset[fx.Node]
    maps: TileMaps = field(default_factory=TileMaps)

    @classmethod
    def of(
        cls, graph: fx.Graph, tangents: Collection[fx.Node], fixed: Collection[fx.Node]
    ) -> JointFacts:
        """Find what depends on `tangents`, and what follows from `fixed` alone.

        Both are placeholders.
        """

        def reached(
            start: Collection[fx.Node], by: Callable[..., bool]
        ) -> set[fx.Node]:
            nodes = set(start)
            for node in graph.nodes:
                inputs = node.all_input_nodes
                if inputs and by(x in nodes for x in inputs):
                    nodes.add(node)
            return nodes

        return cls(
            frozenset(reached(tangents, any)),
            frozenset(reached(fixed, all)),
        )


@dataclass
class TileRegion:
    """Calls that are token-wise, each with the axis of its result, or SUM.

    tokens: the n of all axes. axes: the axes of results, and of operands from outside.
    """

    tokens: int
    nodes: dict[fx.Node, TokenAxis | TokenSum]
    axes: dict[fx.Node, TokenAxis]

    def inputs(self, nodes: Collection[fx.Node]) -> list[fx.Node]:
        """Return the operands of `nodes` that are not in `nodes`."""
        operands = {x: None for node in nodes for x in node.all_input_nodes}
        return [x for x in operands if x not in nodes]

    def outputs(
        self, nodes: Collection[fx.Node], unread: Collection[fx.Node] = ()
    ) -> list[fx.Node]:
        """Return those of `nodes` that others read, apart from readers in `unread`."""
        ignored = {*nodes, *unread}
        return [x for x in nodes if any(user not in ignored for user in x.users)]


@dataclass(frozen=True)
class RegionPart:
    """Calls of a region that run together.

    nodes: in order. outputs: the nodes that others read. gradient: a number among the
    operands for which tiles take 1, because what depends on it, `scaled`, is multiplied
    by it afterwards.
    """

    region: TileRegion
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    gradient: fx.Node | None = None
    scaled: frozenset[fx.Node] = frozenset()

    @property
    def inputs(self) -> list[fx.Node]:
        """Operands from outside."""
        return [x for x in self.region.inputs(self.nodes) if x is not self.gradient]

    def axis(self, node: fx.Node) -> TokenAxis | None:
        """Return the axis of an operand; None if every tile reads all of it."""
        return self.region.axes.get(node)

    def result(self, node: fx.Node) -> TokenAxis | TokenSum | None:
        """Return the axis of a call's result, or SUM.

        None for a number that every tile computes.
        """
        return self.region.nodes.get(node)


class Growing:
    """A region that grows from one large value."""

    def __init__(self, facts: JointFacts, tokens: int, large: int) -> None:
        self.known = facts
        self.tokens = tokens
        self.large = large  # elements
        self.region = TileRegion(tokens, {}, {})

    def is_large(self, node: fx.Node) -> bool:
        """Tell whether a value with an axis counts as large, whatever its dtype is."""
        return elements_of(node) >= self.large

    def grow(self, seed: fx.Node, axis: TokenAxis) -> bool:
        """Add what makes or reads large values; False if not even the seed fits."""
        if not self._place({seed: axis}):
            return False
        waiting = [seed]
        while waiting:
            value = waiting.pop()
            for node in (value, *value.users):
                if node not in self.region.nodes:
                    waiting += self.add(node)
        return bool(self.region.nodes)

    def add(self, node: fx.Node) -> list[fx.Node]:
        """Add a call if it is token-wise; return the large values that are new."""
        if node.op != "call_function":
            return []
        axes, axes_before = self.region.axes, set(self.region.axes)
        if node in axes:
            result: TokenAxis | TokenSum = axes[node]
            operands = self.known.maps.before(node, axes[node], self.tokens)
        else:
            axes_after = self.known.maps.after(node, axes, self.tokens)
            if axes_after is None:
                return []
            result, operands = axes_after
        if operands is None:
            return []
        placed = dict(operands)
        if isinstance(result, TokenAxis):
            placed[node] = result
        if not self._place(placed):
            return []
        self.region.nodes[node] = result
        return [x for x in axes if x not in axes_before and self.is_large(x)]

    def _place(self, axes: dict[fx.Node, TokenAxis]) -> bool:
        """Note axes, unless one of them contradicts or cuts what has no tokens.

        Returns False then.
        """
        for node, axis in axes.items():
            if node in self.known.fixed:
                return False
            if self.region.axes.get(node, axis) != axis:
                return False
            if self.region.nodes.get(node) is SUM:
                return False
        self.region.axes |= axes
        return True

    def copy(self) -> Growing:
        """Return a copy that can grow in another way."""
        growing = Growing(self.known, self.tokens, self.large)
        region = self.region
        growing.region = TileRegion(self.tokens, dict(region.nodes), dict(region.axes))
        return growing

    def close(
        self,
        nodes: set[fx.Node],
        order: dict[fx.Node, int],
        apart: fx.Node | None = None,
    ) -> bool:
        """Add what lies between calls of `nodes`, which have to run in one go.

        False if some of it is not token-wise. order: the places of all nodes of the
        graph. apart: an operand that comes later.
        """
        while between := between_nodes(nodes, order, apart):
            for node in sorted(between, key=order.__getitem__):
                if node not in self.region.nodes:
                    self.add(node)
                if node not in self.region.nodes:
                    return False
                nodes.add(node)
        return True


def between_nodes(
    nodes: set[fx.Node], order: dict[fx.Node, int], apart: fx.Node | None = None
) -> set[fx.Node]:
    """Return what depends on `nodes` and is read by others of them, not in `nodes`."""
    if not nodes:
        return set()
    last = max(order[x] for x in nodes)

    def after(node: fx.Node) -> list[fx.Node]:
        return [x for x in node.users if x not in nodes and order[x] <= last]

    later = reached([x for node in nodes for x in after(node)], after)

    def before(node: fx.Node) -> list[fx.Node]:
        return [x for x in node.all_input_nodes if x in later]

    return {*reached([x for n in nodes for x in before(n) if x is not apart], before)}


def seeds(graph: fx.Graph, facts: JointFacts, least: int) -> Iterator[fx.Node]:
    """Yield values of `least` bytes or more that depend on tokens, largest first."""
    candidates = [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and node not in facts.fixed
        and bytes_of(node) >= least
    ]
    # of equal ones first the one with most dimensions, which tells tokens from batches
    yield from sorted(candidates, key=lambda x: (-bytes_of(x), -value_of(x).dim()))
