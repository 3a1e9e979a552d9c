"""List the calls of a graph in the order in which blocks are looked for.

Some calls do not take part. Constants are copied to where they are used. What depends
on inputs alone and is made once (angles of positions, the seed of a dropout) only
stands in the first block that uses it; it is an operand of every block. Gradients leave
through collectives, which Inductor joins over the whole graph.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

import torch
import torch.fx as fx

from cpcompile.torch_private.operators import OpOverload

from .borders import source
from .signatures import CONSTANTS, is_collective, is_message, signature

LEAST_BLOCKS = 3  # of which two are saved


@dataclass(frozen=True)
class CallSequence:
    """The calls of a graph that may repeat, in order.

    ids: a number per call, equal for equal signatures.

    final: light calls that only make results of the graph, by the last call that each
    reads. They are none of `calls`: some blocks may have more of them than others.
    """

    calls: tuple[fx.Node, ...]
    ids: tuple[int, ...]
    final: dict[fx.Node, list[fx.Node]]


def sequence_of(graph: fx.Graph) -> CallSequence:
    """Return the calls of a graph that may repeat."""
    every = [x for x in graph.nodes if x.op == "call_function"]
    signatures = {x: signature(x) for x in every}
    counts = Counter(x for x in signatures.values() if x is not None)
    apart = _leaving(every) | _given(graph, signatures, counts)
    final = _final([x for x in every if x not in apart], signatures)
    apart |= {x for group in final.values() for x in group}
    calls = tuple(x for x in every if x not in apart)
    numbering: dict[Hashable, int] = {}
    ids = []
    for node in calls:
        key = signatures[node]
        ids.append(numbering.setdefault(node if key is None else key, len(numbering)))
    return CallSequence(calls, tuple(ids), final)


def is_constant(node: fx.Node) -> bool:
    """Tell whether a call has no operands, and the same result wherever it stands."""
    return node.target in CONSTANTS and not node.all_input_nodes


def _given(
    graph: fx.Graph,
    signatures: dict[fx.Node, Hashable],
    counts: Counter[Hashable],
) -> set[fx.Node]:
    """Return constants, and calls that are made once of inputs alone."""
    # of all dropouts of a graph; slow to import
    from cpcompile.torch_private.inductor import seeds

    from_inputs: set[fx.Node] = set()
    unrepeated: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            from_inputs.add(node)
        if node.op != "call_function":
            continue
        key = signatures[node]
        rare = key is not None and counts[key] < LEAST_BLOCKS and not is_message(node)
        rare = rare or node.target is seeds
        rare = rare or isinstance(node.meta.get("val"), torch.SymInt)
        if is_constant(node) or (rare and from_inputs.issuperset(node.all_input_nodes)):
            from_inputs.add(node)
            unrepeated.add(node)
    return unrepeated


def _leaving(every: list[fx.Node]) -> set[fx.Node]:
    """Return collectives after which nothing is computed, and what follows them."""
    light: set[fx.Node] = set()
    for node in reversed(every):
        if _is_light(node) and all(x.op == "output" or x in light for x in node.users):
            light.add(node)
    leaving: set[fx.Node] = set()
    for node in every:
        if node in light and (
            is_collective(node) or not leaving.isdisjoint(node.all_input_nodes)
        ):
            leaving.add(node)
    return leaving


def _is_light(node: fx.Node) -> bool:
    if is_collective(node) or source(node) is not None:
        return True
    if isinstance(node.target, OpOverload):
        return torch.Tag.pointwise in node.target.tags
    return node.target is operator.getitem and is_collective(node.all_input_nodes[0])


def _final(
    every: list[fx.Node], signatures: dict[fx.Node, Hashable]
) -> dict[fx.Node, list[fx.Node]]:
    """Return light calls that only make results, by the last call that they read.

    What the backward needs of a block is made of its values at the end of the forward,
    and the first or last block may lack some of it. A call that other blocks have
    within them is none of these.
    """
    ends = {x for x in every if all(user.op == "output" for user in x.users)}
    within = {signatures[x] for x in every if x not in ends}
    place = {node: i for i, node in enumerate(every)}
    final: dict[fx.Node, list[fx.Node]] = {}
    for node in every:
        if node in ends and _is_light(node) and signatures[node] not in within:
            operands = [x for x in node.all_input_nodes if x in place]
            if operands:
                last = max(operands, key=place.__getitem__)
                final.setdefault(last, []).append(node)
    return final
