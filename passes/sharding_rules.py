"""Calls that DTensor's own propagation does wrong or wastefully on a sharded sequence.

A rule has the form rule(sharder, node) -> bool: True if it gave the node its value,
False if the node is like any other. Rules are found by the node's target.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from cpcompile.errors import CannotRewrite
from cpcompile.passes.assign_part import assign_part, write_as_assignment
from cpcompile.passes.global_cross_entropy import target_placements
from cpcompile.passes.graph import fake_value, where

if TYPE_CHECKING:
    from cpcompile.passes.shard_graph import Sharder

Rule = Callable[["Sharder", fx.Node], bool]


def embedding(sharder: Sharder, node: fx.Node) -> bool:
    """Token and position ids are plain up to here; looked-up vectors are sharded."""
    ids = _argument(node, 0, "input")
    value = sharder.value(ids)
    if isinstance(value, DTensor):
        return False
    if ids in sharder.sharded_ids:
        node.replace_input_with(ids, sharder.sharded_ids[ids])
        sharder.propagate(node)
        return True
    dim = sharder.named_dims.get(ids)
    if dim is None and node in sharder.towards_attention:
        dims = [d for d in range(value.ndim) if sharder.is_length(value.shape[d])]
        dim = dims[-1] if dims else None
    if dim is None:
        return False
    with node.graph.inserting_before(node):
        sharded = sharder.call(sharder.calls.shard, (ids, dim), like=node)
    node.replace_input_with(ids, sharded)
    sharder.propagate(node)
    return True


def cross_entropy(sharder: Sharder, node: fx.Node) -> bool:
    """Mean over all tokens, not the mean of the ranks' means."""
    names = (
        "input", "target", "weight", "size_average", "ignore_index", "reduce",
        "reduction", "label_smoothing",
    )  # fmt: skip
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    logits = sharder.value(given["input"])
    target = sharder.value(given["target"])
    weight = sharder.value(given.get("weight"))
    deprecated = (
        given.get("size_average") is not None or given.get("reduce") is not None
    )
    if not isinstance(logits, DTensor) or deprecated or isinstance(weight, DTensor):
        return False
    class_dim = 1 if logits.ndim > 1 else 0
    dims = {getattr(p, "dim", None) for p in logits.placements}
    partial = any(p.is_partial() for p in logits.placements)
    if class_dim in dims or partial or isinstance(target, DTensor):
        return False
    with node.graph.inserting_before(node):
        place = (given["target"], target_placements(logits, target))
        local_target = sharder.call(sharder.calls.place, place, like=node)
    args = (
        given["input"],
        local_target,
        given["target"],
        given.get("weight"),
        given.get("ignore_index", -100),
        given.get("reduction", "mean"),
        given.get("label_smoothing", 0.0),
    )
    _substitute(sharder, node, sharder.calls.cross_entropy, args)
    return True


def concatenate(sharder: Sharder, node: fx.Node) -> bool:
    """torch.cat ignores 1-D empty tensors, as caches begin; DTensor does not."""
    tensors = _argument(node, 0, "tensors")
    kept = [x for x in tensors if tuple(sharder.value(x).shape) != (0,)]
    if len(kept) == len(tensors) or not kept:
        return False
    if len(kept) == 1:
        sharder.replace(node, kept[0])
        return True
    if node.args:
        node.args = (kept, *node.args[1:])
    else:
        node.kwargs = node.kwargs | {"tensors": kept}
    return False


def mean(sharder: Sharder, node: fx.Node) -> bool:
    """A mean over a sharded dimension is a sum over a count."""
    given = (
        dict(zip(("input", "dim", "keepdim"), node.args, strict=False)) | node.kwargs
    )
    value = sharder.value(given["input"])
    known = {"input", "dim", "axis", "keepdim", "dtype"}
    if not isinstance(value, DTensor) or not known.issuperset(given):
        return False
    dim = given.get("dim", given.get("axis"))
    if dim is not None and not isinstance(dim, int | tuple | list):
        return False
    dims = range(value.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    split = {getattr(p, "dim", None) for p in value.placements}
    if not split & {d % value.ndim for d in dims}:
        return False
    args = (given["input"], dim, given.get("keepdim", False), given.get("dtype"))
    _substitute(sharder, node, sharder.calls.mean, args)
    return True


def dropout(sharder: Sharder, node: fx.Node) -> bool:
    """Every rank uses its part of one mask, not the same mask on every part."""
    given = dict(zip(("input", "p", "training", "inplace"), node.args, strict=False))
    given |= node.kwargs
    value = sharder.value(given["input"])
    p = float(fake_value(given.get("p", 0.5)))
    if not isinstance(value, DTensor):
        return False
    if not given.get("training", True) or p == 0.0:
        sharder.replace(node, _argument(node, 0, "input"))
        return True
    if given.get("inplace", False):
        return in_place(sharder, node)
    with node.graph.inserting_before(node):
        args = (given["input"], p)
        mask = sharder.call(sharder.calls.dropout_mask, args, like=node)
        mask = sharder.call(sharder.calls.replicate, (mask,), like=node)
    _substitute(sharder, node, torch.mul, (given["input"], mask))
    return True


def in_place(sharder: Sharder, node: fx.Node) -> bool:
    """An in-place call on a DTensor becomes a functional one on a copy.

    DTensor refuses some of these calls and loses writes through a view of the sharded
    dimension. On a copy they are right, as long as nobody else sees the memory.
    """
    write_as_assignment(node)
    base = node.args[0] if node.args else None
    if not isinstance(base, fx.Node) or not isinstance(sharder.values[base], DTensor):
        return _write_to_plain(sharder, node)
    if node.kwargs.get("out") is not None:
        raise CannotRewrite(
            f"{node.name} at {where(node)} writes its result to out=; needed a call "
            "that returns a new tensor: leave out= away"
        )
    _refuse_aliases(sharder, node, base)
    if assign_part(sharder, node):
        _use_after(base, node)
        return True
    node.target, node.op = (
        sharder.calls.functional(sharder.callable(node)),
        "call_function",
    )
    originals = (node.args, node.kwargs)
    sharder.wrap_inputs(node)
    if _assigns_to_part(node):
        problem: str | None = "DTensor has no rule for assignment to a part of a tensor"
    else:
        args, kwargs = sharder.value((node.args, node.kwargs))
        sharder.values[node], problem = sharder.trial.run(node.target, args, kwargs)
    written = node
    if problem is not None:
        node.args, node.kwargs = originals
        written = sharder.fall_back(node, problem)
    _use_after(base, written)
    return True


def _write_to_plain(sharder: Sharder, node: fx.Node) -> bool:
    raise CannotRewrite(
        f"{node.name} at {where(node)} writes a sharded tensor into one that every "
        "rank holds in full; needed a call that returns a new tensor: write it with "
        "torch.where, torch.cat or index_put instead of in place"
    )


def _refuse_aliases(sharder: Sharder, node: fx.Node, base: fx.Node) -> None:
    """Raise CannotRewrite if the written memory is read through another name later."""
    written = sharder.storages.get(base)
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    for other in node.graph.nodes:
        same = written is not None and sharder.storages.get(other) == written
        if other in (base, node) or not same or order[other] > order[node]:
            continue
        if other.op == "placeholder":
            raise CannotRewrite(
                f"{node.name} at {where(node)} writes into the argument {other.name}, "
                "of which each rank has a part only, so that the caller would not see "
                "it; needed a call that returns a new tensor, or a clone before it"
            )
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


def is_in_place(node: fx.Node) -> bool:
    """Whether the call writes to its first argument, by torch's naming convention."""
    if node.kwargs.get("inplace") is True or node.kwargs.get("out") is not None:
        return True
    if node.target in _IN_PLACE_OPERATORS:
        return True
    name = node.target if isinstance(node.target, str) else node.target.__name__
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    return name.endswith("_") and not name.endswith("__")


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs[name]


def _substitute(
    sharder: Sharder, node: fx.Node, call: Any, args: tuple[Any, ...]
) -> None:
    before = fake_value(node)
    with node.graph.inserting_before(node):
        new = sharder.call(call, args, like=node)
    after = sharder.values[new]
    assert before.shape == after.shape, (
        f"{call} gives {after.shape}, not {before.shape}"
    )
    sharder.replace(node, new)


_IN_PLACE_OPERATORS = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv,
    operator.ifloordiv, operator.iand, operator.ior, operator.ixor, operator.ipow,
    operator.imatmul, operator.imod, operator.ilshift, operator.irshift, "__setitem__",
}  # fmt: skip

RULES: dict[Any, Rule] = {
    F.embedding: embedding,
    F.cross_entropy: cross_entropy,
    torch.cat: concatenate,
    torch.concat: concatenate,
    torch.concatenate: concatenate,
    torch.mean: mean,
    "mean": mean,
    torch.ops.aten.mean.dim: mean,
    F.dropout: dropout,
    "in_place": in_place,
}
