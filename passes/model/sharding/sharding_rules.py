"""Decide on calls that DTensor does wrong or wastefully on a sharded sequence.

A rule has the form rule(known, node) -> Decision | None; None is a call like any other.
Rules are found by the name of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch.distributed.tensor import DTensor, Replicate, Shard

from cpcompile.errors import RewriteError
from cpcompile.geometry.lengths import is_symbol
from cpcompile.logs import warn_unsharded
from cpcompile.ranks.shardings import is_sequence_sharded

from ...graph.attention_calls import is_attention
from ...graph.calls import canonical_call, spelled
from ...graph.cp_attention import is_cp_attention
from ...graph.effects import is_in_place
from ...graph.loss_calls import ELEMENTWISE, OF_CLASSES
from ...graph.memory_order import memory_order
from ...graph.mixer_calls import mixed_in_parts
from ...graph.new_call import NewCall
from ...graph.nodes import fake_value, where
from ...graph.origins import origin
from ...graph.sequence_tokens import TokenDim, Wanted, constraint
from ...placement.decisions import (
    Decision,
    FallBack,
    Plain,
    Propagate,
    Replace,
)
from ...placement.graph_values import GraphValues
from ...placement.placement_calls import (
    cp_dropout_mask,
    cp_exchange,
    cp_gather_keys,
    cp_key_source,
    cp_log_sigmoid,
    cp_mean,
    cp_mixed_in_parts,
    cp_prelu,
    cp_repeat,
    cp_replicate,
    cp_shard,
    cp_unreduced,
)
from ...placement.scan_calls import scanned_in_parts
from ...placement.scan_parts import cp_scanned_in_parts
from ...placement.window_attention import cp_window_attention
from ..attention.find_attention import attention_operands, unrewritten
from ..moves.move_rules import moved_tokens
from ..moves.window_views import in_windows, window_view, windows_flattened
from ..mutation.functionalise_writes import steps_to_part
from ..mutation.masked_rows import placed_rows, write_rows
from ..mutation.position_rows import FUNCTIONAL, rows_at
from ..mutation.write_rules import in_place, write_part
from ..normalize.pad_convolutions import CONVOLUTIONS, convolution
from .flattened_tokens import flattened_tokens
from .look_up_rules import RULES as OF_LOOK_UPS
from .norm_rules import RULES as OF_NORMS
from .product_rules import (
    linear,
    linear_of_parts,
    product_of_plain,
    token_products,
)
from .sharded_losses import class_loss, elementwise_loss
from .strided_windows import RULES as OF_WINDOWS
from .strided_windows import overlapping_windows, strided_convolution
from .tensor_parallel import on_other_axes
from .unknown_sizes import unknown_size

ShardingRule = Callable[[GraphValues, fx.Node], Decision | None]


def decide(known: GraphValues, node: fx.Node, distributed: bool) -> Decision:
    """Decide what becomes of a call.

    distributed: whether it runs on DTensors.
    """
    of_others = on_other_axes(known, node)
    if of_others is not None:
        return of_others
    if is_attention(node):
        return left_attention(known, node, distributed)
    if node.target is constraint:
        return constrain(known, node)
    if node.target is mixed_in_parts:
        args = (*node.args, known.cp_axis)
        return Propagate(NewCall(cp_mixed_in_parts, args))
    if node.target is scanned_in_parts:
        named = {"cp_axis": known.cp_axis}
        return Propagate(NewCall(cp_scanned_in_parts, node.args, named))
    if distributed and is_in_place(node):
        return in_place(known, node)
    steps = steps_to_part(node)
    if distributed and steps is not None:
        return write_part(known, node, steps)
    reason = known.ctx.findings.fallback_calls.get(origin(node) or "")
    if distributed and reason is not None and not is_cp_attention(node):
        of_layer = spelled(node) == "linear"
        in_parts = linear_of_parts(known, node) if of_layer else None
        return in_parts or FallBack(reason)
    if distributed and node.target is write_rows:
        return placed_rows(known, node, node.args[0])
    unknown = unknown_size(known, node) if distributed else None
    if unknown is not None:
        return unknown
    rule = RULES.get(canonical_call(node).name)
    if spelled(node) == "einsum":  # any number of operands: it has no names for them
        rule = token_products
    if known.joint_of(node) is not None:  # the user's DTensors, as DTensor has them
        rule = None
    decision = None if rule is None else rule(known, node)
    if distributed and decision is None:
        decision = moved_tokens(known, node)
    return decision or (Propagate() if distributed else Plain())


def concatenate(known: GraphValues, node: fx.Node) -> Decision | None:
    """Leave 1-D empty tensors, as caches begin, out of torch.cat.

    torch.cat ignores them; DTensor does not.
    """
    tensors = canonical_call(node).arguments["tensors"]
    full = [x for x in tensors if tuple(known.value(x).shape) != (0,)]
    if len(full) == len(tensors) or not full:
        return None
    if len(full) == 1:
        return Replace(NewCall(torch.clone, (full[0],)))  # written, it is not full[0]
    if not any(isinstance(known.value(x), DTensor) for x in tensors):
        return None
    if node.args:
        return Propagate(NewCall(node.target, (full, *node.args[1:]), node.kwargs))
    return Propagate(NewCall(node.target, (), node.kwargs | {"tensors": full}))


def log_sigmoid(known: GraphValues, node: fx.Node) -> Decision | None:
    """Write logsigmoid, for which DTensor has no rule, as a formula."""
    x = canonical_call(node).arguments["input"]
    if not isinstance(known.value(x), DTensor):
        return None
    return Replace(NewCall(cp_log_sigmoid, (x,)))


def sgn(known: GraphValues, node: fx.Node) -> Decision | None:
    """Write sgn of real numbers as sign, whose gradient is zeros that DTensor makes.

    That of sgn is made by autograd itself, from the size alone, and takes no part in
    a trace.
    """
    x = canonical_call(node).arguments["input"]
    if not isinstance(known.value(x), DTensor) or known.value(x).is_complex():
        return None
    return Replace(NewCall(torch.sign, (x,)))


def prelu(known: GraphValues, node: fx.Node) -> Decision | None:
    """Write prelu, whose backward DTensor has no rule for, as a formula."""
    given = canonical_call(node).arguments
    if not isinstance(known.value(given["input"]), DTensor):
        return None
    return Replace(NewCall(cp_prelu, (given["input"], given["weight"])))


def mean(known: GraphValues, node: fx.Node) -> Decision | None:
    """Make a mean over a sharded dimension a sum divided by a count."""
    arguments = canonical_call(node).arguments
    value, dim = known.value(arguments["input"]), arguments.get("dim")
    dim = None if dim in ((), []) else dim
    if not isinstance(value, DTensor):
        return None
    if dim is not None and not isinstance(dim, int | tuple | list):
        return None
    dims = range(value.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    split = {getattr(p, "dim", None) for p in value.placements}
    if not split & {d % max(value.ndim, 1) for d in dims}:
        return None
    args = (
        arguments["input"],
        dim,
        arguments.get("keepdim", False),
        arguments["dtype"],
    )
    return Replace(NewCall(cp_mean, args))


def dropout(known: GraphValues, node: fx.Node) -> Decision | None:
    """Let every rank use its part of one mask, not the same mask on every part."""
    arguments = canonical_call(node).arguments
    value, p = known.value(arguments["input"]), float(fake_value(arguments["p"]))
    if not isinstance(value, DTensor):
        return None
    if not arguments["training"] or p == 0.0:
        return Replace(arguments["input"])
    order = memory_order(fake_value(node))
    args = (arguments["input"], p) if order is None else (arguments["input"], p, order)
    mask = NewCall(cp_dropout_mask, args)
    whole = NewCall(cp_replicate, (mask, known.cp_axis))
    return Replace(NewCall(torch.mul, (arguments["input"], whole)))


def left_attention(known: GraphValues, node: fx.Node, distributed: bool) -> Decision:
    """Decide on an attention call that was not rewritten.

    It is right, but slow, where its sequence is whole.

    Raises: RewriteError for a sharded sequence, if strict.
    """
    call = next(c for c in known.ctx.findings.calls if c.node is node)
    operands = tuple(known.value(x) for x in attention_operands(node))
    apart = attention_apart(known, node) if distributed else None
    if apart is not None:
        return apart
    if not any(is_sequence_sharded(x, x.ndim - 2) for x in operands):
        if call.unsupported and not call.already_local:
            warn_unsharded(f"attention at {where(node)}", call.unsupported)
        return Propagate() if distributed else Plain()
    message = unrewritten(call, operands)
    if known.ctx.strict:
        raise RewriteError(message)
    return FallBack(message)  # one mask: all ranks have the same random state


def attention_apart(known: GraphValues, node: fx.Node) -> Decision | None:
    """Decide on attention of batch entries that ranks share out, such as windows."""
    given = canonical_call(node).arguments
    if spelled(node) != "scaled_dot_product_attention" or fake_value(
        given["dropout_p"]
    ):
        return None  # numbers for all entries are drawn at once
    operands = [given[name] for name in ("query", "key", "value")]
    if known.joint_of(node) is not None:
        return None
    placements = [getattr(known.value(x), "placements", None) for x in operands]
    if placements[0] is None or placements.count(placements[0]) < len(placements):
        return None
    placement = placements[0][known.ctx.axis]
    split = [p for p in placements[0] if not p.is_replicate()]
    if split != [placement] or getattr(placement, "dim", None) != 0:
        return None
    mask = given["attn_mask"]
    if mask is not None:
        value = known.value(mask)
        if any(not p.is_replicate() for p in getattr(value, "placements", ())):
            return None
        if value.ndim == fake_value(node).ndim and value.shape[0] > 1:
            outer = getattr(placement, "split_factor", 1)
            mask = known.cut(mask, TokenDim(0, outer))
        elif not isinstance(value, DTensor):
            mask = NewCall(cp_replicate, (mask, known.cp_axis))
    numbers = [given[name] for name in ("is_causal", "scale", "enable_gqa")]
    return Replace(NewCall(cp_window_attention, (*operands, mask, *numbers)))


def unfold(known: GraphValues, node: fx.Node) -> Decision | None:
    """Make windows side by side a view, and move tokens to those that overlap."""
    arguments = canonical_call(node).arguments
    value, size = known.value(arguments["input"]), arguments.get("size")
    if size is None:  # torch.nn.functional's, of images
        return None
    if not isinstance(value, DTensor):
        return None
    if arguments["step"] != size:
        return overlapping_windows(known, node)
    dim = arguments["dimension"] % value.ndim
    length, ranks = value.shape[dim], known.ctx.ranks
    if value.placements[known.ctx.axis] != Shard(dim) or is_symbol(length):
        return None
    if not size or length % size:
        return overlapping_windows(known, node)  # some tokens are in none
    shape = (length // size, size)
    cut: NewCall | None = NewCall(torch.unflatten, (arguments["input"], dim, shape))
    if shape[0] % ranks:
        after = (*value.shape[:dim], *shape, *value.shape[dim + 1 :])
        cut = in_windows(known, arguments["input"], after)
    return None if cut is None else Replace(NewCall(torch.movedim, (cut, dim + 1, -1)))


def view(known: GraphValues, node: fx.Node) -> Decision | None:
    """Keep flattened tokens, and windows of tokens, in the parts of ranks."""
    return (
        flattened_tokens(known, node)
        or window_view(known, node)
        or windows_flattened(known, node)
    )


def repeat(known: GraphValues, node: fx.Node) -> Decision | None:
    """Repeat tokens that ranks share out as a view: DTensor would gather them."""
    arguments = canonical_call(node).arguments
    x, repeats = arguments["input"], tuple(arguments["repeats"])
    value = known.value(x)
    if not isinstance(value, DTensor) or len(repeats) != value.ndim:
        return None
    placement = value.placements[known.ctx.axis]
    if type(placement) is not Shard or repeats[placement.dim] == 1:
        return None
    return Propagate(NewCall(cp_repeat, (x, repeats, placement.dim)))


def expand_as(known: GraphValues, node: fx.Node) -> Decision | None:
    """Keep a plain value, such as a mask, plain: only the other's shape is read."""
    arguments = canonical_call(node).arguments
    shape = tuple(fake_value(node).shape)
    if isinstance(known.value(arguments["input"]), DTensor) or any(
        map(is_symbol, shape)
    ):
        return None
    return Plain(NewCall(torch.Tensor.expand, (arguments["input"], shape)))


def constrain(known: GraphValues, node: fx.Node) -> Decision:
    """Bring a value to what a constraint wants; most values are there already."""
    arguments: tuple[Any, ...] = node.args
    (x, wanted, *dims), axis = arguments, known.cp_axis
    value = known.value(x)
    placement = value.placements[known.ctx.axis] if isinstance(value, DTensor) else None
    gathered = NewCall(cp_gather_keys, (x, axis))
    if wanted is Wanted.ALL_ROWS and placement not in (None, Replicate()):
        return Propagate(gathered)
    if wanted is Wanted.KEY_SOURCE and (placement or value.requires_grad):
        whole = x if placement else NewCall(cp_replicate, (x, axis))
        return Replace(NewCall(cp_key_source, (whole, axis)))
    if wanted is Wanted.COMPUTED_KEYS:
        return Replace(NewCall(cp_unreduced, (x, axis)))
    if wanted is Wanted.EXCHANGED:
        source, target = dims
        if target is None and placement == Shard(source):
            return Replace(gathered)
        if target is not None and placement != Shard(target):
            if placement == Shard(source):
                return Replace(NewCall(cp_exchange, (x, axis, source, target)))
            return Replace(NewCall(cp_shard, (x, axis, target)))
    return Replace(x)


RULES: dict[str, ShardingRule] = {
    **dict.fromkeys(("view", "reshape", "flatten"), view),
    "unflatten": window_view,
    **dict.fromkeys(FUNCTIONAL, rows_at),
    **OF_WINDOWS,
    **OF_NORMS,
    **dict.fromkeys(
        CONVOLUTIONS,
        lambda known, node: (
            convolution(known, node) or strided_convolution(known, node)
        ),
    ),
    **OF_LOOK_UPS,
    **dict.fromkeys(OF_CLASSES, class_loss),
    **dict.fromkeys(ELEMENTWISE, elementwise_loss),
    "matmul": lambda known, node: (
        token_products(known, node) or product_of_plain(known, node)
    ),
    "linear": lambda known, node: linear(known, node) or product_of_plain(known, node),
    **dict.fromkeys(("mm", "addmm"), product_of_plain),
    "cat": concatenate,
    "mean": mean,
    **dict.fromkeys(("logsigmoid", "log_sigmoid"), log_sigmoid),
    "prelu": prelu,
    "sgn": sgn,
    "dropout": dropout,
    "unfold": unfold,
    "repeat": repeat,
    "expand_as": expand_as,
}
