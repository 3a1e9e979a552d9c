"""Fix rules of DTensor that give wrong results (torch 2.13), or that are missing.

- cumsum: the dimension is compared with the sharded one as it is given, so that
  x.cumsum(-2) is computed on each part. So is the gradient of x.select(-1, 0).
- gather and scatter_add: parts of two operands go together, also where their sizes
  differ, as of an index of fewer rows than its input, and begin at other rows.
- Reductions over [], which to torch are all dimensions, leave the result of a part.
- Views of tensors without elements look for groups of equal size without end.
- Answers of topk, kthvalue and histc are remembered without the number they take.
- The backward of group norm has no rule (torch 2.13 to 2.15); a derived one is slow.
- new_zeros and new_full of another shape than their operand are whole on every rank,
  also where the sharded dimensions are the operand's, as in the backward of gather.
- _unsafe_index, by which interpolate picks rows, tries 720 placements. Of many only
  those are tried here in which at most two operands are cut, or all of these alike.
- Shifts of bits return x: `__rshift__` is taken for a call in place, by its name.
- `_int_mm`, `view_copy`, `detach_copy` (of a functional scan), and backwards of calls
  element by element that are not tagged so, as softplus, have no rule.
- torch.cat of one device ignores 1-D empty tensors, with which caches of keys begin.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._decompositions import DecompShardingStrategy
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSpec, RuntimeSchemaInfo
from torch.distributed.tensor._ops import _math_ops, _view_ops
from torch.distributed.tensor._ops.single_dim_strategy import (
    _ShardingPlaceholder,
    register_single_dim_strategy,
)

from cpcompile.geometry.lengths import hashable, is_same
from cpcompile.torch_private.distributed import by_dtensor

aten = torch.ops.aten
SCANS = (aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default)
SELECTED = aten.select_backward.default
BY_ELEMENTS = (
    aten.softplus_backward.default,
    aten.leaky_relu_backward.default,
    aten.elu_backward.default,
    aten.mish_backward.default,
    aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardtanh_backward.default,
    aten.softshrink_backward.default,
    aten.hardshrink_backward.default,
)
FILLED = (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default)
_MOST_CANDIDATES = 128
SHIFTS = {
    aten.__rshift__: torch.bitwise_right_shift,
    aten.__lshift__: torch.bitwise_left_shift,
}
RULES_OF_OTHERS = {
    aten._unsafe_index.Tensor: aten.index.Tensor,
    aten._unsafe_index_put.default: aten.index_put.default,
    aten._int_mm.default: aten.mm.default,
    aten.detach_copy.default: aten.detach.default,
    aten.view_copy.default: aten.view.default,
    aten.scatter_reduce.two: aten.scatter.src,
}
COUNTED = (aten.topk.default, aten.kthvalue.default, aten.histc.default)


@functools.cache
def install() -> None:
    """Have DTensor see dimensions from the front, and remember all numbers."""
    infer = _math_ops._infer_reduction_dims
    _math_ops._infer_reduction_dims = lambda dims_arg, ndim: (
        None if dims_arg in ([], ()) else infer(dims_arg, ndim)
    )
    _view_ops.view_groups = _of_some_elements(_view_ops.view_groups)
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    rules = propagator.op_strategy_funcs
    for scan in SCANS:
        if scan in rules:
            rules[scan] = _from_the_front(rules[scan])
    if SELECTED in rules:
        rules[SELECTED] = _of_selected(rules[SELECTED])
    for paired in (aten.gather.default, aten.scatter_add.default):
        if paired in rules:
            rules[paired] = _of_equal_sizes(rules[paired])
    by_dim = propagator.op_single_dim_strategy_funcs
    for filled in FILLED:
        if filled in rules:
            rules[filled] = _as_its_operand(rules[filled])
        elif filled in by_dim:  # from torch 2.15 on
            by_dim[filled] = dataclasses.replace(
                by_dim[filled], func=_by_equal_dims(by_dim[filled].func)
            )
    infos = (
        propagator.op_to_schema_info,
        propagator.op_to_schema_info_for_single_dim_strategy,
    )
    for table in infos:
        for op in COUNTED:
            if op in table:  # what is compared is the first argument, and all others
                table[op] = dataclasses.replace(table[op], static_argnum=1)
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    for shift, of_bits in SHIFTS.items():
        for overload in (shift.Scalar, shift.Tensor):
            handlers.setdefault(overload, functools.partial(_shifted, of_bits))
    handlers[aten.cat.default] = _without_empty
    for table in (rules, by_dim, *infos):
        for op, other in RULES_OF_OTHERS.items():
            if other in table:
                table.setdefault(op, table[other])
    DecompShardingStrategy._get_candidate_placements = staticmethod(  # type: ignore[method-assign]
        _few(DecompShardingStrategy._get_candidate_placements)
    )
    _add_group_norm_backward(propagator)
    by_elements = dict.fromkeys(BY_ELEMENTS, _by_elements)
    by_elements[aten._prelu_kernel_backward.default] = _by_elements_of_weight
    for op, rule in by_elements.items():
        if op not in rules and op not in propagator.op_single_dim_strategy_funcs:
            register_single_dim_strategy(
                op,
                schema_info=RuntimeSchemaInfo(1),
                allow_unbacked_sharding=True,
                allow_uneven_sharding=True,
            )(rule)


def _of_some_elements(view_groups: Any) -> Any:
    @functools.wraps(view_groups)
    def groups(before: Any, after: Any) -> Any:
        empty = any(isinstance(n, int) and n == 0 for n in before)
        if empty and tuple(before) != tuple(_view_ops.normalize_sizes(after)):
            raise RuntimeError("DTensor cannot view a tensor without elements")
        return view_groups(before, after)

    return groups


def _few(candidates: Any) -> Any:
    @functools.wraps(candidates)
    def few(schema: Any) -> Any:
        every = candidates(schema)
        if len(every) <= _MOST_CANDIDATES:
            return every
        return [x for x in every if _is_likely(x)]

    return few


def _is_likely(placements: Any) -> bool:
    """Tell whether at most two operands are not replicated, or all of these alike."""
    split = [p for p in placements if p is not None and not p.is_replicate()]
    return len(split) <= 2 or len(set(split)) == 1


def _add_group_norm_backward(propagator: Any) -> None:
    forward, backward = (
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
    )
    adjusters = getattr(propagator, "op_to_scalar_shape_adjuster", {})
    if forward not in adjusters or backward in adjusters:
        return  # no such rule of the forward, or torch has one of the backward
    register_single_dim_strategy(backward, schema_info=RuntimeSchemaInfo(1))(
        _by_samples
    )
    adjusters[backward] = adjusters[forward]


def _shifted(of_bits: Any, op: Any, args: Any, kwargs: Any) -> Any:
    return of_bits(*args)


def _without_empty(op: Any, args: Any, kwargs: Any) -> Any:
    """Call cat without the tensors that do not count."""
    nonempty = [x for x in args[0] if tuple(x.shape) != (0,)] or args[0][:1]
    if len(nonempty) == 1:
        return nonempty[0].clone()
    return by_dtensor(op, (nonempty, *args[1:]), kwargs)


def _by_samples(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Shard by samples; each gives a part of the gradients of weight and bias.

    Samples are independent. Operands are the gradient and the input [N, C, *], mean and
    rstd [N, groups], and the weight [C], if there is one.
    """
    sample = _ShardingPlaceholder(0)
    weight = [] if args[4] is None else [Replicate()]
    return [[sample, Partial(), Partial(), *[sample] * 4, *weight]]


def _by_elements(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Shard both operands, which have one shape, and the result along any dimension."""
    return [[_ShardingPlaceholder(dim)] * 3 for dim in range(len(args[0].shape))]


def _by_elements_of_weight(op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Shard gradient, input and both results; a weight is broadcast along some dims."""
    _, x, weight = args
    dims = [_ShardingPlaceholder(dim) for dim in range(len(x.shape))]
    return [
        [dim] * 4 + [dim if weight.shape[dim.dim] > 1 else Replicate()] for dim in dims
    ]


def _as_its_operand(rule: Any) -> Any:
    """Offer the operand's placements where the sharded dimensions are the same."""

    @functools.wraps(rule)
    def placed(schema: Any) -> Any:
        operand, shape = schema.args_schema[:2]
        strategy = rule(schema)
        if len(shape) != operand.ndim or tuple(shape) == tuple(operand.shape):
            return strategy
        for own in operand.strategies:
            spec = own.output_spec
            dims = [getattr(x, "dim", None) for x in spec.placements if x.is_shard()]
            others = [x for x in spec.placements if not x.is_shard()]
            if not dims or not all(x.is_replicate() for x in others):
                continue
            if all(is_same(operand.shape[d], shape[d]) for d in dims):
                of_operand = OpSpec(
                    output_specs=DTensorSpec(spec.mesh, spec.placements),
                    input_specs=(spec,),
                    redistribute_cost=[[-0.1] * len(operand.strategies)],
                )
                strategy.strategies.append(of_operand)
        return strategy

    return placed


def _of_equal_sizes(rule: Any) -> Any:
    @functools.wraps(rule)
    def placed(schema: Any) -> Any:
        given = rule(schema)
        shapes = [x.shape for x in schema.args_schema if hasattr(x, "strategies")]
        given.strategies = [x for x in given.strategies if _fit(shapes, x.input_specs)]
        return given

    return placed


def _fit(shapes: Any, specs: Any) -> bool:
    """Tell whether all that is cut along one dimension has one size there."""
    for axis in zip(*(x.placements for x in specs), strict=True):
        pairs = [(p, n) for p, n in zip(axis, shapes, strict=True) if p.is_shard()]
        sizes = {(p.dim, hashable(n[p.dim])) for p, n in pairs}
        if len(sizes) > len({dim for dim, _ in sizes}):
            return False
    return True


def _by_equal_dims(rule: Any) -> Any:
    """Shard what is filled along the dimensions that are the operand's."""

    @functools.wraps(rule)
    def placed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (operand, shape), strategies = args[:2], rule(op, args, kwargs)
        if len(shape) != len(operand.shape):
            return strategies
        return [
            [given if _is_same_dim(given, operand.shape, shape) else filled, given]
            for filled, given in strategies
        ]

    return placed


def _is_same_dim(placement: Any, shape: Any, other: Any) -> bool:
    if not isinstance(placement, _ShardingPlaceholder):
        return False
    return is_same(shape[placement.dim], other[placement.dim])


def _of_selected(rule: Any) -> Any:
    @functools.wraps(rule)
    def counted(schema: Any) -> Any:
        gradient, sizes, dim, *rest = schema.args_schema
        args = (gradient, sizes, dim % len(sizes), *rest)
        return rule(type(schema)(schema.op, args, schema.kwargs_schema))

    return counted


def _from_the_front(rule: Any) -> Any:
    @functools.wraps(rule)
    def counted(schema: Any) -> Any:
        x, dim, *rest = schema.args_schema
        args = (x, dim % max(x.ndim, 1), *rest)
        return rule(type(schema)(schema.op, args, schema.kwargs_schema))

    return counted
