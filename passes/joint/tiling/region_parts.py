"""Cut the calls of a region into parts that run in one go.

A region is one part if its gradients can be computed at once, see Note [Gradients
before their time]. Other regions run forward and backward, which computes again what
the forward made.

Note [Gradients before their time]
What autograd makes is linear in the gradients that come in. If there is only one, a
number g, then gradients are the gradients for g = 1, times g. It is checked that every
call is linear in what depends on g, because a custom autograd.Function need not be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch.fx as fx
from torch import Tensor

from ...flow.linear_calls import is_linear
from ...graph.nodes import reached, value_of
from ...graph.sequence_tokens import TokenAxis
from .tile_regions import Growing, JointFacts, RegionPart, TileRegion, bytes_of, is_view

Order = dict[fx.Node, int]  # of all nodes of a graph


def parts_at(
    seed: fx.Node, facts: JointFacts, order: Order
) -> tuple[RegionPart, ...] | None:
    """Return the parts of the region of a large value: one, or forward and backward.

    None if nothing is gained there by tiles.
    """
    best: tuple[RegionPart, ...] | None = None
    shape = value_of(seed).shape
    sizes = [(n, dim) for dim, n in enumerate(shape) if isinstance(n, int) and n > 1]
    for size, dim in sorted(sizes, reverse=True):  # the longest of equal ones
        growing = Growing(facts, size, shape.numel() // 2)
        if not growing.grow(seed, TokenAxis(dim)):
            continue
        parts = _parts(growing, facts, order)
        if not parts or not all(_pays(part, facts) for part in parts):
            continue
        if best is None or _made(parts) > _made(best):
            best = parts
    return best


def _parts(
    growing: Growing, facts: JointFacts, order: Order
) -> tuple[RegionPart, ...] | None:
    """Return one part if gradients can be computed at once, else two.

    These are forward and backward. None if a part cannot run in one go.
    """
    backward = {x for x in growing.region.nodes if x in facts.backward}
    if backward:
        at_once = _at_once(growing.copy(), facts, order)
        if at_once is not None and _pays(at_once, facts):
            return (at_once,)
    region = growing.region
    if not growing.close(backward, order):
        return None
    forward = {x for x in region.nodes if x not in facts.backward}
    needed = _ancestors(region.outputs(forward, backward), forward)
    if not growing.close(needed, order):
        return None
    parts = []
    if needed:
        results = region.outputs(needed, region.nodes)
        parts.append(_part(region, needed, results, order))
    if backward:
        both = backward | _ancestors(backward, forward)
        parts.append(_part(region, both, region.outputs(backward), order))
    return tuple(parts)


def _at_once(growing: Growing, facts: JointFacts, order: Order) -> RegionPart | None:
    """Return all of a region as one part; see Note [Gradients before their time].

    None if its gradients cannot be computed at once.
    """
    region = growing.region
    nodes, numbers = set(region.nodes), set[fx.Node]()  # numbers belong to no token
    while True:
        entering = [x for x in region.inputs(nodes | numbers) if x in facts.backward]
        wide = [x for x in entering if x in region.axes]
        for node in wide:
            if any(map(growing.is_large, set(node.all_input_nodes) - nodes)):
                return None  # it is another region's
            growing.add(node)
            if node not in region.nodes:
                return None
            nodes.add(node)
        if wide:
            continue
        if len(entering) != 1 or not _is_number(entering[0]):
            # They may follow from one number, which weights of classes multiply.
            last = max(entering, key=order.__getitem__, default=None)
            if last is None or last.op != "call_function" or growing.is_large(last):
                return None
            numbers.add(last)
            continue
        before = len(nodes)
        if not growing.close(nodes, order, entering[0]):
            return None
        if len(nodes) == before:
            break
    every = nodes | numbers
    depends = {entering[0]}
    for node in sorted(every, key=order.__getitem__):
        if any(x in depends for x in node.all_input_nodes):
            depends.add(node)
            if not is_linear(node, depends):
                return None
    if any(x in nodes for node in numbers for x in node.all_input_nodes):
        return None  # a gradient that depends on what the region makes
    part = _part(region, every, region.outputs(nodes, numbers), order)
    return dataclasses.replace(
        part, gradient=entering[0], scaled=frozenset(depends & nodes)
    )


def _is_number(node: fx.Node) -> bool:
    """Tell whether a value is a tensor of one number."""
    value = value_of(node)
    return isinstance(value, Tensor) and value.numel() == 1


def _ancestors(nodes: Collection[fx.Node], among: set[fx.Node]) -> set[fx.Node]:
    """Return the `nodes` in `among`, and what they follow from by way of `among`."""

    def before(node: fx.Node) -> list[fx.Node]:
        return [x for x in node.all_input_nodes if x in among]

    return {x for x in reached(nodes, before) if x in among}


def _part(
    region: TileRegion,
    nodes: Collection[fx.Node],
    outputs: list[fx.Node],
    order: Order,
) -> RegionPart:
    place = order.__getitem__
    return RegionPart(
        region, tuple(sorted(nodes, key=place)), tuple(sorted(outputs, key=place))
    )


def _made(parts: tuple[RegionPart, ...]) -> int:
    """Return the bytes of the values that only tiles have."""
    return sum(
        bytes_of(x)
        for part in parts
        for x in part.nodes
        if x not in part.outputs and _has_axis(part, x)
    )


def _pays(part: RegionPart, facts: JointFacts) -> bool:
    """Tell whether what is made inside is large against what enters and leaves."""
    inside = [x for x in part.nodes if x not in part.outputs and not is_view(x)]
    largest = max((bytes_of(x) for x in inside if _has_axis(part, x)), default=0)
    entering = [x for x in part.inputs if part.axis(x) is not None]
    leaving = [x for x in part.outputs if _has_axis(part, x)]
    # A part that only turns large values into others makes none less.
    sides = [max(map(bytes_of, x), default=0) for x in (entering, leaving)]
    if 2 * min(sides) >= largest:
        return False
    # Nor does one that takes entries of a large value, which stays whole.
    whole = (x for x in part.inputs if part.axis(x) is None and x not in facts.fixed)
    if any(bytes_of(x) >= largest for x in whole):
        return False
    return sum(map(bytes_of, entering + leaving)) <= 2 * largest


def _has_axis(part: RegionPart, node: fx.Node) -> bool:
    return isinstance(part.result(node), TokenAxis)
