"""Decide on writes into sharded tensors: functional calls on copies, or refused.

functionalise_writes has brought what a write through a view needs into this form.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch.fx as fx
from torch.distributed.tensor import DTensor

from cpcompile.errors import RewriteError
from cpcompile.torch_private import pytree

from ...flow.trial import WritesArguments
from ...graph.calls import spelled
from ...graph.constant_arguments import Callee
from ...graph.context import InputKind
from ...graph.effects import result_is_argument, written_by
from ...graph.new_call import NewCall, with_inputs
from ...graph.nodes import where
from ...graph.origins import origin
from ...placement.decisions import (
    Decision,
    FallBack,
    Plain,
    Propagate,
    Replace,
    Write,
)
from ...placement.graph_values import GraphValues
from ...placement.placement_calls import (
    cp_functional,
    cp_gather,
    cp_replicate,
    cp_write_everywhere,
)
from ..moves.move_rules import assigned_tokens
from .kept_writes import is_kept, kept_write
from .local_writes import ViewStep, local_write
from .masked_rows import placed_rows, rows_written, write_rows_
from .number_rows import masked_index
from .position_rows import WRITES_AT, assigned_rows, rows_at


def in_place(known: GraphValues, node: fx.Node) -> Decision:
    """Decide on an in-place call on a DTensor: it becomes functional, on a copy.

    DTensor refuses some of these calls and loses writes through a view of the sharded
    dimension. On a copy they are right, as long as nobody else sees the memory. Memory
    that the caller keeps is written in place.

    Raises: RewriteError if others see the memory, or if the call writes into more than
        its first argument.
    """
    base = node.args[0] if node.args else None
    if node.kwargs.get("out") is not None:
        raise RewriteError(
            f"{node.name} at {where(node)} writes its result to out=; needed a call "
            "that returns a new tensor: leave out= away"
        )
    if not isinstance(base, fx.Node) or not _is_first(node, base):
        written_names = ", ".join(x.name for x in written_by(node)) or "no tensor"
        raise RewriteError(
            f"{node.name} at {where(node)} writes into {written_names}; needed an "
            "operator that writes into its first argument alone and returns nothing "
            "else, or one that returns new tensors: register it with mutates_args=()"
        )
    if _is_memory_of_caller(known, base):
        return Plain(_on_gathered(known, node))
    if is_kept(known, base):
        return kept_write(known, node, base)
    if _is_whole_parameter(known, base):
        function = Callee(known.callable(node))
        args = (base, function, *node.args[1:])
        return Replace(NewCall(cp_write_everywhere, args, node.kwargs))
    _refuse_aliases(known, node, base)
    if node.target is write_rows_:
        return _or_fallback(known, node, base, placed_rows(known, node, base))
    function = Callee(known.callable(node))
    copied: fx.Node | NewCall = base
    if not isinstance(known.values[base], DTensor):
        copied = NewCall(cp_replicate, (base, known.cp_axis))
    call = NewCall(cp_functional, (copied, function, *node.args[1:]), node.kwargs)
    if spelled(node) != "setitem":
        decision = rows_at(known, node) if spelled(node) in WRITES_AT else None
        return _or_fallback(known, node, base, decision or Propagate(call))
    _, index, part = node.args
    masked = masked_index(base, index)
    if masked is not None and masked.basic is None and not isinstance(part, fx.Node):
        written = rows_written(known, base, masked.mask, None, part, masked.dim)
        return _or_fallback(known, node, base, written)
    local = local_write(
        known, base, part, [ViewStep(Callee(operator.getitem), (index,))]
    )
    if local is None:
        local = _assigned(known, base, part, index)
    if local is not None:
        return Write(base, Replace(local))
    rows = assigned_rows(known, base, index, part)
    if rows is not None:
        return _or_fallback(known, node, base, rows)
    reason = "DTensor has no rule for assignment to a part of a tensor"
    return Write(base, FallBack(reason, call))


def _or_fallback(
    known: GraphValues, node: fx.Node, base: fx.Node, decision: Propagate
) -> Write:
    problem = known.ctx.findings.fallback_calls.get(origin(node) or "")
    return Write(base, FallBack(problem, decision.call) if problem else decision)


def write_part(
    known: GraphValues, node: fx.Node, steps: Sequence[ViewStep]
) -> Decision:
    """Decide on a call that puts a part into a tensor where views lead.

    See functionalise_writes.
    """
    whole, part, *_ = node.args
    assert isinstance(whole, fx.Node)
    local = local_write(known, whole, part, steps)
    if (
        local is None
        and len(steps) == 1
        and steps[0].callee.function is operator.getitem
    ):
        local = _assigned(known, whole, part, *steps[0].args)
    if local is None:
        return Write(whole, FallBack("DTensor loses writes through a view"))
    return Write(whole, Replace(local))


def _assigned(
    known: GraphValues, base: fx.Node, part: Any, index: Any
) -> NewCall | None:
    """Return the call that assigns to a range of tokens, or to channels of it.

    x[:, 1:, :4] = part  ->  y = x[:, :, :4];  y[:, 1:] = part;  x[:, :, :4] = y
    """
    found = assigned_tokens(known, base, part, index)
    if found is None:
        return None
    call, channels = found
    if channels is None:
        return call
    step = ViewStep(Callee(operator.getitem), (channels,))
    return local_write(known, base, call, [step])


def _is_first(node: fx.Node, base: fx.Node) -> bool:
    """Tell whether a call writes into its first argument, and returns nothing else."""
    return written_by(node) == [base] and (not node.users or result_is_argument(node))


def _is_memory_of_caller(known: GraphValues, base: fx.Node) -> bool:
    """Tell whether a plain tensor lies in an argument of the graph.

    It may be a cache, for example, that is a buffer.
    """
    if isinstance(known.values[base], DTensor):
        return False
    memory = known.storages.get(base)
    inputs = base.graph.find_nodes(op="placeholder")
    return memory is not None and memory in {known.storages.get(x) for x in inputs}


def _is_whole_parameter(known: GraphValues, base: fx.Node) -> bool:
    """Tell whether a DTensor lies in a plain parameter, of which all ranks have all."""
    value = known.values[base]
    if known.is_joint(value) or not isinstance(value, DTensor):
        return False
    memory = known.storages.get(base)
    inputs = known.ctx.inputs.items()
    return all(p.is_replicate() for p in value.placements) and memory in {
        known.storages.get(x)
        for x, graph_input in inputs
        if graph_input.kind is InputKind.PARAMETER
    } - {None}


def _on_gathered(known: GraphValues, node: fx.Node) -> NewCall:
    """Make the call on gathered tensors: every rank writes all, as one device would."""

    def gathered(x: fx.Node) -> fx.Node | NewCall:
        distributed = isinstance(known.values[x], DTensor)
        return NewCall(cp_gather, (x,)) if distributed else x

    return with_inputs(node, gathered)


def _refuse_aliases(known: GraphValues, node: fx.Node, base: fx.Node) -> None:
    """Raise RewriteError if the written memory is read through another name later."""
    written = known.storages.get(base)
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    for other in node.graph.nodes:
        same = written is not None and known.storages.get(other) == written
        if other is node or not same or order[other] > order[node]:
            continue
        if other.op in ("placeholder", "get_attr"):
            raise RewriteError(
                f"{node.name} at {where(node)} writes into the argument {other.name}, "
                "and each rank has only a part of what is written, so that the caller "
                "would not see it; needed a call that returns a new tensor, or a clone "
                "before it"
            )
        if other is base:
            continue
        if any(order[user] > order[node] for user in other.users):
            raise RewriteError(
                f"{node.name} at {where(node)} writes into {base.name}, which shares "
                f"its memory with {other.name}, and that is read later; needed a write "
                "that only one tensor sees: assign to the tensor itself (x[:, 0] = y "
                "instead of x[:, 0].copy_(y)) or clone it first"
            )


def refuse_lost_writes(known: GraphValues, node: fx.Node, problem: str) -> None:
    """Raise RewriteError for a call that would write to a gathered copy."""
    leaves = pytree.tree_leaves(known.value((node.args, node.kwargs)))
    written = problem.leaves if isinstance(problem, WritesArguments) else ()
    if any(isinstance(leaves[number], DTensor) for number in written):
        raise RewriteError(
            f"{node.name} at {where(node)} writes into an argument without saying "
            "so; needed one that returns new tensors, or an operator whose "
            "mutates_args name what it writes"
        )
