"""Read the graphs that AOTAutograd hands to the compiler after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor

from cpcompile.accounting.counted_calls import calls_of, line_of
from cpcompile.accounting.graph_account import (
    Exchange,
    GraphAccount,
    GraphDirection,
    Joined,
    Kind,
    Line,
    Purpose,
    grouped,
    total,
)
from cpcompile.accounting.messages import group_of, sent_by
from cpcompile.accounting.work import Shares, shares_noted, work_of
from cpcompile.geometry.tensor_sizes import bytes_of
from cpcompile.ops.comm.communication import group_by_name
from cpcompile.passes.graph.nodes import module_path
from cpcompile.torch_private.fake_tensors import detect_fake_mode

_OF_OPERATOR = {
    "dim_exchange": Purpose.MIXER,
    "passed_states": Purpose.MIXER,
    "passed_states_backward": Purpose.MIXER,
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


@dataclass(frozen=True)
class Accounting:
    """The reader of the graphs of one compilation; `accounts` gets one for each graph.

    inputs: None reads nothing, as for a graph where nothing is sharded.
    shares: shares of the forward's calls, for the backward.
    """

    inputs: Inputs | None = None
    accounts: list[GraphAccount] = field(default_factory=list)
    shares: Shares = field(default_factory=dict)

    def read(
        self,
        module: fx.GraphModule,
        is_backward: bool,
        buckets: Mapping[Kind, Sequence[Sequence[fx.Node]]] = MappingProxyType({}),
    ) -> None:
        """Note what a graph does; nothing is changed.

        buckets: collectives of a kind that the compiler will send together.
        """
        if self.inputs is None:
            return
        _fill_values(module.graph)
        direction = GraphDirection.BACKWARD if is_backward else GraphDirection.FORWARD
        joined = [
            Joined(direction, kind, sum(map(len, of_kind)), len(of_kind))
            for kind, of_kind in buckets.items()
            if len(of_kind) < sum(map(len, of_kind))
        ]
        ranks = group_by_name(self.inputs.group).size()
        account = GraphAccount(
            direction=direction,
            exchanges=exchanges_of(module, direction, self.inputs),
            work=work_of(module, ranks, self.shares, self.inputs.key_lines),
            joined=tuple(joined),
            saved_bytes=_saved_bytes(module) if is_backward else 0,
        )
        self.accounts.append(account)

    def tracing(self) -> AbstractContextManager[None]:
        """Return a context in which traced calls get the notes that `read` reads."""
        return nullcontext() if self.inputs is None else shares_noted(self.inputs.group)


def _fill_values(graph: fx.Graph) -> None:
    """Give random numbers that are drawn again the values that AOTAutograd leaves out.

    In the backward of a checkpoint; seen in torch 2.13, with aot_eager.
    """
    drawn = torch.ops.higher_order.run_with_rng_state
    for node in graph.find_nodes(op="call_function", target=drawn):
        if "val" not in node.meta:
            _, call, *operands = fx.map_arg(node.args, lambda x: x.meta["val"])
            mode = detect_fake_mode([x.meta.get("val") for x in graph.nodes])
            with mode or nullcontext():
                node.meta["val"] = call(*operands, **node.kwargs)


def _saved_bytes(backward: fx.GraphModule) -> int:
    """Return the bytes of what a backward gets that AOTAutograd has no words for.

    It describes inputs of the program, and the gradients of its results.
    """
    values = [
        node.meta.get("val")
        for node in backward.graph.find_nodes(op="placeholder")
        if node.meta.get("desc") is None
    ]
    return bytes_of([x for x in values if isinstance(x, Tensor)])


def exchanges_of(
    module: fx.GraphModule, direction: GraphDirection, inputs: Inputs
) -> tuple[Exchange, ...]:
    """Return all exchanges of one run of the graph, the largest first."""
    rows: list[tuple[Exchange, Any]] = []
    for node in calls_of(module):
        for sent in sent_by(node):
            if not sent.messages:
                continue
            purpose, what = _purpose(node, direction, inputs)
            row = Exchange(
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
            # Calls of a line are one row, whatever their modules.
            rows.append((row, (row.kind, purpose, row.line, what)))
    groups = grouped(rows, lambda x: x[1])
    sums = [total([row for row, _ in group]) for group in groups]
    return tuple(sorted(sums, key=lambda x: -x.bytes))


def _purpose(
    node: fx.Node, direction: GraphDirection, inputs: Inputs
) -> tuple[Purpose, str]:
    """Return what a call communicates for, and the name of what it sends, or ""."""
    if getattr(node.target, "namespace", None) == "cp":
        return _OF_OPERATOR.get(node.target._opname, Purpose.ATTENTION), ""  # type: ignore[union-attr]
    if not _ranks(group_of(node)) <= _ranks(inputs.group):
        return Purpose.OTHER_AXES, ""
    source = _source_input(node)
    if source is not None and source in inputs.parameters:
        return Purpose.PARAMETER, inputs.names[source]
    results = _results_of(node)
    if results is None:
        for_keys = line_of(node) in inputs.key_lines
        return (Purpose.ATTENTION if for_keys else Purpose.VALUE), ""
    if direction is GraphDirection.FORWARD:
        return Purpose.RESULT, ""
    # What AOTAutograd notes of each result.
    notes = node.graph.output_node().meta.get("desc") or {}
    indices = {_index(getattr(notes[x], "grad_of", None)) for x in results if notes}
    names = [inputs.names[i] for i in sorted(x for x in indices if x is not None)]
    return Purpose.GRADIENT, ", ".join(names)


def _ranks(group: str) -> set[int]:
    return set(dist.get_process_group_ranks(group_by_name(group)))


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


def _results_of(node: fx.Node) -> set[int] | None:
    """Return places of the results made of a collective; None if calls read it."""
    (results,) = node.graph.output_node().args
    results = results if isinstance(results, tuple | list) else (results,)
    places: set[int] = set()
    todo, done = [node], {node}
    while todo:
        value = todo.pop()
        for user in value.users:
            if user.op == "output":
                places |= {i for i, x in enumerate(results) if x is value}
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
