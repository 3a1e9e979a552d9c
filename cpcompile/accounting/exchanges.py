"""List what a graph exchanges, by the line of the program that caused it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
import torch.fx as fx
from torch import Tensor

from cpcompile.accounting.graph_account import Exchange, GraphDirection, Line, Purpose
from cpcompile.accounting.lines import calls_of, line_of
from cpcompile.accounting.messages import Sent, group_of, sent_by
from cpcompile.ops.comm.communication import group_by_name
from cpcompile.passes.graph.nodes import module_path

_OF_OPERATOR = {
    "dim_exchange": Purpose.MIXER,
    "passed_states": Purpose.MIXER,
    "passed_states_backward": Purpose.MIXER,
    "halo_exchange": Purpose.NEIGHBOURS,
    "halo_exchange_backward": Purpose.NEIGHBOURS,
    "moved_tokens": Purpose.NEIGHBOURS,
    "moved_tokens_backward": Purpose.NEIGHBOURS,
    "relayout": Purpose.LAYOUT,
}


@dataclass(frozen=True)
class Inputs:
    """The inputs of a graph, and the group of the sequence.

    names: of each input, in order, for a reader. parameters: which are parameters.
    group: the name of the group whose ranks share the sequence.
    key_lines: the lines whose values every rank gathers, or computes, for its keys
        because a plan says so.
    """

    names: tuple[str, ...]
    parameters: frozenset[int]
    group: str
    key_lines: frozenset[Line] = frozenset()


def exchanges_of(
    module: fx.GraphModule, direction: GraphDirection, inputs: Inputs
) -> tuple[Exchange, ...]:
    """Return all exchanges of one run of the graph, the largest first."""
    members = set(dist.get_process_group_ranks(group_by_name(inputs.group)))
    results = _results(module)
    rows: dict[Any, Exchange] = {}
    for node in calls_of(module):
        for sent in sent_by(node):
            if not sent.messages:
                continue
            purpose, what = _purpose(node, direction, inputs, members, results)
            new = _exchange(node, direction, sent, purpose, what)
            key = (new.kind, purpose, new.line, what)
            rows[key] = _added(rows[key], new) if key in rows else new
    return tuple(sorted(rows.values(), key=lambda x: -x.bytes))


def _exchange(
    node: fx.Node, direction: GraphDirection, sent: Sent, purpose: Purpose, what: str
) -> Exchange:
    return Exchange(
        direction=direction,
        kind=sent.kind,
        purpose=purpose,
        line=line_of(node),
        what=what or module_path(node),
        calls=1,
        messages=sent.messages,
        bytes=sent.bytes,
        at_most=sent.at_most,
    )


def _added(before: Exchange, new: Exchange) -> Exchange:
    return replace(
        before,
        calls=before.calls + new.calls,
        messages=before.messages + new.messages,
        bytes=before.bytes + new.bytes,
        at_most=before.at_most or new.at_most,
    )


def _purpose(
    node: fx.Node,
    direction: GraphDirection,
    inputs: Inputs,
    members: set[int],
    results: Sequence[Any],
) -> tuple[Purpose, str]:
    """Return what a call communicates for, and the name of what it sends, or ""."""
    if getattr(node.target, "namespace", None) == "cp":
        return _OF_OPERATOR.get(node.target._opname, Purpose.ATTENTION), ""  # type: ignore[union-attr]
    other_ranks = (
        set(dist.get_process_group_ranks(group_by_name(group_of(node)))) - members
    )
    if other_ranks:
        return Purpose.OTHER_AXES, ""
    source = _source_input(node)
    if source is not None and source in inputs.parameters:
        return Purpose.PARAMETER, inputs.names[source]
    ends = _ends(node)
    if ends is None:
        for_keys = line_of(node) in inputs.key_lines
        return (Purpose.ATTENTION if for_keys else Purpose.VALUE), ""
    if direction is GraphDirection.FORWARD:
        return Purpose.RESULT, ""
    indices = {_index(getattr(results[end], "grad_of", None)) for end in ends}
    names = [inputs.names[i] for i in sorted(x for x in indices if x is not None)]
    return Purpose.GRADIENT, ", ".join(names)


def _results(module: fx.GraphModule) -> list[Any]:
    """Return what AOTAutograd notes of each result."""
    output = module.graph.output_node()
    (values,) = output.args
    count = len(values) if isinstance(values, tuple | list) else 1
    return list(output.meta.get("desc") or [None] * count)


def _index(description: Any) -> int | None:
    """Return the place of an input in the graph that AOTAutograd got, or None."""
    index = getattr(description, "idx", None)
    return index if isinstance(index, int) else None


def _source_input(node: fx.Node) -> int | None:
    """Find the input that a collective sends as it is, or after calls on it alone."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return _index(node.meta.get("desc")) if node.op == "placeholder" else None


_FEW = 64  # nodes between the sum of a gradient and the result


def _ends(node: fx.Node) -> set[int] | None:
    """Return places of the results made of a collective; None if calls read it."""
    (results,) = node.graph.output_node().args
    places: set[int] = set()
    todo, done = [node], {node}
    while todo:
        value = todo.pop()
        for user in value.users:
            if user.op == "output":
                places |= {i for i, x in enumerate(_items(results)) if x is value}
            elif user not in done:
                others = [x for x in user.all_input_nodes if x not in done]
                if any(x.op == "call_function" and not _is_fixed(x) for x in others):
                    return None
                done.add(user)
                todo.append(user)
        if len(done) > _FEW:
            return None
    return places


def _is_fixed(node: fx.Node) -> bool:
    """Tell whether a value is made of no tensor, as the places of tokens are."""
    todo, done = [node], {node}
    while todo:
        value = todo.pop()
        if value.op != "call_function" and isinstance(value.meta.get("val"), Tensor):
            return False
        if len(done) > _FEW:
            return False
        new = [x for x in value.all_input_nodes if x not in done]
        done.update(new)
        todo += new
    return True


def _items(results: Any) -> Iterator[Any]:
    yield from results if isinstance(results, tuple | list) else (results,)
