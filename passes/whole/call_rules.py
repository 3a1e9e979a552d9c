"""Calls of which DTensor has no exact rule for shards, or one that gathers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.errors import RewriteError
from cpcompile.geometry.layout import Layout
from cpcompile.geometry.lengths import hashable, is_same
from cpcompile.ops.by_rows import BOTH
from cpcompile.ops.dtensor.local_part import contiguous_strides
from cpcompile.ops.latent_steps import LATENT_KEYS
from cpcompile.torch_private import pytree
from cpcompile.torch_private.distributed import StridedShard, TensorMeta
from cpcompile.torch_private.fake_tensors import disable_current_modes
from cpcompile.torch_private.operators import OpOverload

from ..flow.trial import DRAWS_NUMBERS, draws_numbers
from ..graph.constant_arguments import MeshAxis
from .composition_rules import composition_rules
from .cut_alike import cut_alike, local_of, placements_of
from .data_indices import index_rules
from .few_tokens import PICKS, PUTS, pick_rules
from .flattened_rows import by_rows_of_batch
from .keep_products import PRODUCT, product_rules
from .other_axes import MOVE, moved
from .parameter_calls import parameter_rules
from .reduced_tokens import RULES as REDUCTIONS
from .reduced_tokens import summed
from .row_programs import row_rules
from .sequence_moves import move_rules
from .shared_mixer_rules import latent_step, shared_mixer_rules
from .token_order import TokenOrder
from .uneven_views import viewed
from .window_rules import window_rules

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default)


class CallRules:
    """The rules for tokens in one order.

    lengths: of sequences, which may become more.
    """

    def __init__(self, order: TokenOrder, lengths: Collection[Any] = ()) -> None:
        self.order = order
        self._known: dict[Any, Callable[..., Any]] = {
            **move_rules(order.cp_axis, order.layout, lengths),
            **composition_rules(),
            **shared_mixer_rules(order.cp_axis),
            **window_rules(order.cp_axis),
            **index_rules(order.cp_axis, functools.partial(_along, order=order)),
            **parameter_rules(order.cp_axis.mesh),
            **row_rules(order),
            **product_rules(order),
            **REDUCTIONS,
            **dict.fromkeys(_VIEWS, functools.partial(_view, order.cp_axis, lengths)),
            MOVE: functools.partial(moved, chunks=None),
            aten.embedding_dense_backward.default: _looked_up_often,
            LATENT_KEYS: functools.partial(latent_step, order.cp_axis),
        }
        for call, few in pick_rules(order.cp_axis, order.layout, lengths).items():
            self._known[call] = _or(few, self.of(call))

    def of(self, call: Any) -> Callable[..., Any]:
        """Return what to run for a call on DTensors: a rule of ours, or the call."""
        if call not in self._known:
            self._known[call] = _rule_of(call, self.order)
        rule: Callable[..., Any] = self._known[call]
        return rule


def _or(few: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule for calls that read few tokens, and for those that do not."""

    def either(*args: Any, **options: Any) -> Any:
        result = None if options else few(*args)
        return rule(*args, **options) if result is None else result

    return either


def cuts_in_order(call: Any) -> bool:
    """Tell whether a rule of ours cuts what is whole, in the order of the tokens."""
    ours = (*_ROWS, *BOTH, *PUTS, aten.native_dropout.default, PRODUCT)
    return call in ours or _is_element_wise(call)


def adds_up(call: Any) -> bool:
    """Tell whether all that a call sends are sums, which have no order."""
    return call in (*REDUCTIONS, *BOTH, *PICKS) or _is_element_wise(call)


def _rule_of(call: Any, order: TokenOrder) -> Callable[..., Any]:
    if call in _ROWS:
        return _along(call, order)
    if call is aten.native_dropout.default:
        return functools.partial(_dropout, order)
    if call is aten.expand.default:
        return _expand
    if call in _DRAWING:
        return _drawing(call)
    if isinstance(call, OpOverload) and torch.Tag.nondeterministic_seeded in call.tags:
        return _of_whole_alone(call, order)
    if _is_element_wise(call):
        return _element_wise(call, order)
    return by_rows_of_batch(call, order) if isinstance(call, OpOverload) else call


def _is_element_wise(call: Any) -> bool:
    return isinstance(call, OpOverload) and torch.Tag.pointwise in call.tags


def _element_wise(call: OpOverload, order: TokenOrder) -> Callable[..., Any]:
    """Keep shards where they are.

    What is whole is cut as rows of a flattened batch are cut, which DTensor cannot, and
    in the order of the tokens, of which DTensor does not know; and a sum that meets
    shards which it is spread over is added up before that.
    """
    always = order.layout is not Layout.CONTIGUOUS

    def elements(*args: Any, **options: Any) -> Any:
        cut = [x for x in args if any(hasattr(p, "dim") for p in placements_of(x))]
        size = max((x.numel() for x in cut), default=0)
        args = tuple(
            summed(x) if isinstance(x, DTensor) and x.numel() < size else x
            for x in args
        )
        rows = any(isinstance(p, StridedShard) for x in args for p in placements_of(x))
        if rows or (always and cut):
            return call(*cut_alike(list(map(summed, args)), order), **options)
        return call(*args, **options)

    return elements


def _drawing(call: OpOverload) -> Callable[..., Any]:
    """Draw numbers for all tokens on every rank, alike, as one device draws them."""

    def drawn(x: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(x, DTensor):
            return call(x, *args, **options)
        whole = _like_whole(x)
        return call(whole, *args, **options)

    return drawn


def _like_whole(x: DTensor) -> Tensor:
    """Return a tensor of all tokens; numbers are drawn in the order of its memory."""
    sizes = x.shape, x.stride()
    return torch.empty_strided(*sizes, dtype=x.dtype, device=x.device)


def _of_whole_alone(call: OpOverload, order: TokenOrder) -> Callable[..., Any]:
    """Refuse shards: every rank would draw the same numbers for its own part.

    Attention without dropout draws none.
    """
    without = by_rows_of_batch(call, order)

    def drawn(*args: Any, **options: Any) -> Any:
        if not draws_numbers(call, args, options):
            return without(*args, **options)
        operands = pytree.tree_leaves((args, options))
        if any(not p.is_replicate() for x in operands for p in placements_of(x)):
            raise RewriteError(DRAWS_NUMBERS)
        return call(*args, **options)

    return drawn


def _dropout(order: TokenOrder, x: Any, p: float, train: bool | None) -> Any:
    """Draw one mask for all tokens; each rank reads its rows of it."""
    if not isinstance(x, DTensor) or not train:
        return aten.native_dropout.default(x, p, train)
    whole = torch.ones_like(_like_whole(x))
    factors, mask = aten.native_dropout.default(whole, p, train)
    _, factors, mask = cut_alike([x, factors, mask], order)
    return x * factors, mask


def _looked_up_often(
    grad: Any, indices: Any, rows: int, padding: int, by_frequency: bool
) -> Any:
    """Refuse counts of the tokens of one rank."""
    operands = grad, indices
    if by_frequency and any(
        not p.is_replicate() for x in operands for p in placements_of(x)
    ):
        raise RewriteError("its gradient is scaled by counts of all tokens")
    call = aten.embedding_dense_backward.default
    return call(grad, indices, rows, padding, by_frequency)


def _expand(x: Any, sizes: Sequence[int], **options: Any) -> Any:
    """Add up a sum over the ranks before it is expanded, as of one row to all rows."""
    return aten.expand.default(summed(x), sizes, **options)


def _view(
    cp_axis: MeshAxis, lengths: Collection[Any], x: Any, sizes: Sequence[int]
) -> Any:
    """View x; copy it first if a rule of ours gave it another order in memory.

    Without dimensions of one entry, with which DTensor flattens no uneven shard.
    """
    if not isinstance(x, DTensor):
        return aten.view.default(x, sizes)
    if not _can_view(x, sizes):
        local = x._local_tensor.contiguous()
        meta = TensorMeta(x.shape, contiguous_strides(x.shape), local.dtype)
        spec = dataclasses.replace(x._spec, tensor_meta=meta)
        x = DTensor(local, spec, requires_grad=False)
    cut = {getattr(p, "dim", None) for p in x.placements}
    ones = [d for d, n in enumerate(x.shape) if is_same(n, 1) and d not in cut]
    x = x.squeeze(ones) if ones and cut - {None} else x
    return viewed(x, sizes, cp_axis, lengths)


def _can_view(x: Tensor, sizes: Sequence[int]) -> bool:
    with disable_current_modes():  # what they raise differs
        like = torch.empty_strided(x.shape, x.stride(), device="meta")
        try:
            like.view(sizes)
        except (RuntimeError, ValueError):
            return False
    return True


def _along(call: OpOverload, order: TokenOrder) -> Callable[..., Any]:
    """Run a look-up or a write along one dimension, row by row."""

    def rows(whole: Any, dim: int, *rest: Any, **options: Any) -> Any:
        x, *others = cut_alike([whole, *rest], order)
        if not _are_cut_alike([x, *others], dim % x.ndim):
            return call(whole, dim, *rest, **options)
        local = call(local_of(x), dim, *map(local_of, others), **options)
        looks_up = call is aten.gather.default
        shape = others[0].shape if looks_up else x.shape
        strides = contiguous_strides(shape) if looks_up else x.stride()
        meta = TensorMeta(shape, strides, local.dtype)
        # It says more of a placement than `placements`: how a strided one is read.
        spec = dataclasses.replace(x._spec, tensor_meta=meta)
        return DTensor(local, spec, requires_grad=False)

    return rows


def _are_cut_alike(operands: list[Any], dim: int) -> bool:
    """Tell whether all tensors are cut in the same way, and not along `dim`."""
    tensors = [x for x in operands if isinstance(x, Tensor)]
    placements = placements_of(tensors[0])
    cut: Any = [getattr(p, "dim", None) for p in placements if not p.is_replicate()]
    if not cut or None in cut or dim in cut:
        return False
    sizes = {tuple(hashable(x.shape[d]) for d in cut) for x in tensors}
    return len(sizes) == 1 and all(placements_of(x) == placements for x in tensors)


# They draw as many numbers as their operand has entries, and do not read it.
_DRAWING = (
    *(aten.bernoulli.p, aten.rand_like.default, aten.randn_like.default),
    *(aten.normal_functional.default, aten.uniform.default, aten.random.default),
    *(aten.exponential.default, aten.geometric.default, aten.cauchy.default),
    *(aten.log_normal.default, aten.random.to, getattr(aten.random, "from")),
)
_ROWS = (
    *(aten.gather.default, aten.scatter_add.default),
    *(aten.scatter.value, aten.scatter.src),
)
