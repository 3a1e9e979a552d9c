"""Calls that DTensor's own propagation does wrong or wastefully on a sharded sequence.

A rule has the form rule(sharder, node) -> bool: True if it gave the node its value,
False if the node is like any other. Rules are found by the node's target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from cpcompile.errors import CannotRewrite, DropoutUnsupported
from cpcompile.logs import warn_once
from cpcompile.passes.attention.find_attention import attention_operands, unrewritten
from cpcompile.passes.graph.context import AttentionCall
from cpcompile.passes.graph.memory_order import memory_order
from cpcompile.passes.graph.nodes import fake_value, where
from cpcompile.passes.graph.sequence_tokens import TokenDim
from cpcompile.passes.propagation.global_cross_entropy import target_placements
from cpcompile.passes.sharding.interpreter import ShardingInterpreter
from cpcompile.passes.sharding.write_rules import in_place
from cpcompile.ranks.shardings import is_sequence_sharded

Rule = Callable[[ShardingInterpreter, fx.Node], bool]


def embedding(sharder: ShardingInterpreter, node: fx.Node) -> bool:
    """Token and position ids are plain up to here; looked-up vectors are sharded."""
    ids = _argument(node, 0, "input")
    value = sharder.value(ids)
    if isinstance(value, DTensor):
        return False
    if ids in sharder.sharded_ids:
        node.replace_input_with(ids, sharder.sharded_ids[ids])
        sharder.propagate(node)
        return True
    named = sharder.named_dims.get(ids)
    dim = sharder.sequence_dims.get(ids) if named is None else TokenDim(named)
    if dim is None or dim.outer > 1:
        return False  # DTensor looks up a whole batch of flattened ids at once
    with node.graph.inserting_before(node):
        sharded = sharder.shard(ids, dim, like=node)
    node.replace_input_with(ids, sharded)
    sharder.propagate(node)
    return True


def cross_entropy(sharder: ShardingInterpreter, node: fx.Node) -> bool:
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
    sharder.note_met(given["target"], local_target)
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


def concatenate(sharder: ShardingInterpreter, node: fx.Node) -> bool:
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


def mean(sharder: ShardingInterpreter, node: fx.Node) -> bool:
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


def dropout(sharder: ShardingInterpreter, node: fx.Node) -> bool:
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
        in_place(sharder, node)
        return True
    order = memory_order(fake_value(node))
    with node.graph.inserting_before(node):
        args = (given["input"], p) if order is None else (given["input"], p, order)
        mask = sharder.call(sharder.calls.dropout_mask, args, like=node)
        mask = sharder.call(sharder.calls.replicate, (mask,), like=node)
    _substitute(sharder, node, torch.mul, (given["input"], mask))
    return True


def left_attention(sharder: ShardingInterpreter, node: fx.Node) -> None:
    """A call that was not rewritten: right, but slow, where its sequence is whole."""
    call = next(c for c in sharder.ctx.calls if c.node is node)
    operands = tuple(sharder.value(x) for x in attention_operands(node))
    if not any(is_sequence_sharded(x, x.ndim - 2) for x in operands):
        warn_about_whole(call)
        sharder.propagate(node)
        return
    message = unrewritten(call, operands)
    if sharder.ctx.strict and call.dropout_p:
        raise DropoutUnsupported(f"{message}, or pass {_GATHERED_DROPOUT}")
    if sharder.ctx.strict:
        raise CannotRewrite(message)
    sharder.fall_back(node, message)  # one mask: all ranks have the same random state


def warn_about_whole(call: AttentionCall | None) -> None:
    """Say that every rank computes all of a call, which an obstacle keeps as it is."""
    if call is not None and call.obstacle and not call.left_alone:
        warn_once(
            f"attention at {where(call.node)} is computed in whole on every rank: "
            f"{call.obstacle}"
        )


_GATHERED_DROPOUT = (
    "options={'strict': False} to compute this call on gathered tensors, with the mask "
    "that one device draws"
)


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs[name]


def _substitute(
    sharder: ShardingInterpreter, node: fx.Node, call: Any, args: tuple[Any, ...]
) -> None:
    before = fake_value(node)
    with node.graph.inserting_before(node):
        new = sharder.call(call, args, like=node)
    after = sharder.values[new]
    assert before.shape == after.shape, (
        f"{call} gives {after.shape}, not {before.shape}"
    )
    sharder.replace(node, new)


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
}
