"""Writes on sharded tensors: functional calls on copies, or refused.

What a write through a view needs was brought into this form by functionalise_writes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch.fx as fx
from torch.distributed.tensor import DTensor

from cpcompile.errors import CannotRewrite
from cpcompile.passes.graph.nodes import result_is_argument, where, written_by
from cpcompile.passes.graph.origins import origin
from cpcompile.passes.sharding.by_rows import by_rows
from cpcompile.passes.sharding.interpreter import ShardingInterpreter
from cpcompile.passes.sharding.local_writes import Step, write_locally
from cpcompile.passes.sharding.pin_gradients import pin_for


def in_place(sharder: ShardingInterpreter, node: fx.Node) -> None:
    """An in-place call on a DTensor becomes a functional one on a copy.

    DTensor refuses some of these calls and loses writes through a view of the sharded
    dimension. On a copy they are right, as long as nobody else sees the memory.
    """
    base = node.args[0] if node.args else None
    if node.kwargs.get("out") is not None:
        raise CannotRewrite(
            f"{node.name} at {where(node)} writes its result to out=; needed a call "
            "that returns a new tensor: leave out= away"
        )
    if not isinstance(base, fx.Node) or not _is_first(node, base):
        given = ", ".join(x.name for x in written_by(node)) or "no tensor"
        raise CannotRewrite(
            f"{node.name} at {where(node)} writes into {given}; needed an operator "
            "that writes into its first argument alone and returns nothing else, or "
            "one that returns new tensors: register it with mutates_args=()"
        )
    if _is_memory_of_caller(sharder, base):
        _gather_operands(sharder, node)
        sharder.forget_wrapped(base)
        return
    _refuse_aliases(sharder, node, base)
    plain = base
    if not isinstance(sharder.values[base], DTensor):
        base = _distributed(sharder, node, base)
    node.target, node.op = (
        sharder.calls.functional(sharder.callable(node)),
        "call_function",
    )
    originals = (node.args, node.kwargs)
    sharder.wrap_inputs(node)
    problem: str | None
    pin, written = None, None
    if _assigns_to_part(node):
        problem = "DTensor has no rule for assignment to a part of a tensor"
        steps: list[Step] = [(operator.getitem, (node.args[1],), {})]
        written = write_locally(sharder, node, base, node.args[2], steps)
    else:
        args, kwargs = sharder.value((node.args, node.kwargs))
        result, problem = sharder.trial.run(node.target, args, kwargs)
        problem = sharder.ctx.unforeseen.get(origin(node) or "", problem)
        if by_rows(sharder, sharder.row_proofs, node, result):
            problem = None
        else:
            pin = pin_for(sharder, node, problem, sharder.pins_of_parts)
            problem = problem if pin is None else None
            sharder.values[node] = result
    if written is not None:
        sharder.replace(node, written)
    elif problem is not None:
        node.args, node.kwargs = originals
        written = sharder.fall_back(node, problem)
    else:
        written = node if pin is None else sharder.insert_after(node, pin)
    _use_after(base, written)
    _use_after(plain, written)
    _keep_stream(sharder, base, written)


def _is_first(node: fx.Node, base: fx.Node) -> bool:
    """Whether a call writes into its first argument, and returns nothing else."""
    return written_by(node) == [base] and (not node.users or result_is_argument(node))


def _keep_stream(sharder: ShardingInterpreter, base: fx.Node, written: fx.Node) -> None:
    """What was written has its tokens where the tensor has them."""
    if base in sharder.sequence_dims:
        sharder.sequence_dims.setdefault(written, sharder.sequence_dims[base])
        sharder.shard_again(written)


def _is_memory_of_caller(sharder: ShardingInterpreter, base: fx.Node) -> bool:
    """Whether a plain tensor lies in an argument: a cache, say, that is a buffer."""
    if isinstance(sharder.values[base], DTensor):
        return False
    memory = sharder.storages.get(base)
    inputs = base.graph.find_nodes(op="placeholder")
    return memory is not None and memory in {sharder.storages.get(x) for x in inputs}


def _gather_operands(sharder: ShardingInterpreter, node: fx.Node) -> None:
    """Every rank writes all of it, as one device would."""

    def gathered(x: fx.Node) -> fx.Node:
        if not isinstance(sharder.values[x], DTensor):
            return x
        with node.graph.inserting_before(node):
            return sharder.call(sharder.calls.gather, (x,), like=node)

    node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), gathered)
    args, kwargs = sharder.value((node.args, node.kwargs))
    sharder.values[node] = sharder.trial.plain(
        node, sharder.callable(node), args, kwargs
    )


def write_part(
    sharder: ShardingInterpreter, node: fx.Node, steps: Sequence[Step]
) -> None:
    """A part is put into a tensor where views lead; see functionalise_writes."""
    whole, part = node.args
    assert isinstance(whole, fx.Node)
    written = write_locally(sharder, node, whole, part, steps)
    if written is None:
        written = sharder.fall_back(node, "DTensor loses writes through a view")
    else:
        sharder.replace(node, written)
    _keep_stream(sharder, whole, written)


def _distributed(sharder: ShardingInterpreter, node: fx.Node, base: fx.Node) -> fx.Node:
    """A plain tensor, into which a sharded one is written, as a replicated one."""
    with node.graph.inserting_before(node):
        copy = sharder.call(sharder.calls.replicate, (base,), like=node)
    node.args = (copy, *node.args[1:])
    return copy


def _refuse_aliases(sharder: ShardingInterpreter, node: fx.Node, base: fx.Node) -> None:
    """Raise CannotRewrite if the written memory is read through another name later."""
    written = sharder.storages.get(base)
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    for other in node.graph.nodes:
        same = written is not None and sharder.storages.get(other) == written
        if other is node or not same or order[other] > order[node]:
            continue
        if other.op in ("placeholder", "get_attr"):
            raise CannotRewrite(
                f"{node.name} at {where(node)} writes into the argument {other.name}, "
                "and each rank has only a part of what is written, so that the caller "
                "would not see it; needed a call that returns a new tensor, or a clone "
                "before it"
            )
        if other is base:
            continue
        if any(order[user] > order[node] for user in other.users):
            raise CannotRewrite(
                f"{node.name} at {where(node)} writes into {base.name}, which shares "
                f"its memory with {other.name}, and that is read later; needed a write "
                "that only one tensor sees: assign to the tensor itself (x[:, 0] = y "
                "instead of x[:, 0].copy_(y)) or clone it first"
            )


def _use_after(base: fx.Node, written: fx.Node) -> None:
    """Later readers of `base` read what was written."""
    order = {n: i for i, n in enumerate(base.graph.nodes)}
    for user in list(base.users):
        if user is not written and order[user] > order[written]:
            user.replace_input_with(base, written)


def _assigns_to_part(node: fx.Node) -> bool:
    return "setitem" in node.target.__name__  # type: ignore[union-attr]
