"""Reductions over tokens that DTensor gathers, by reductions that it adds up.

    var(x, 1)      ->  sum((x - sum(x, 1) / S) ^ 2, 1) / (S - 1)
    softmax(x, 1)  ->  e / sum(e, 1), e = exp(x - amax(x, 1))
    amax(f, 0)     ->  amax(unflatten(f, 0, [B, S]), [0, 1])    of a flattened batch
    mm(t(f), f)    ->  the product of this rank's rows, a part of the sum

So a few numbers per channel are sent, in place of all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from cpcompile.ops.dtensor.local_part import contiguous_strides
from cpcompile.ops.dtensor.shares import sharing_rows
from cpcompile.torch_private.distributed import DTensorSpec, StridedShard, TensorMeta
from cpcompile.torch_private.operators import OpOverload

aten = torch.ops.aten
Rule = Callable[..., Any]


def summed(x: Any) -> Any:
    """Add up the parts that ranks have of x, if it is such a sum."""
    if not isinstance(x, DTensor) or not any(p.is_partial() for p in x.placements):
        return x
    whole = [Replicate() if p.is_partial() else p for p in x.placements]
    return x.redistribute(placements=whole)


def _where_cut(call: OpOverload, rule: Rule) -> Rule:
    """Take `rule` where a dimension that is reduced is cut, else the call."""

    def reduced(*args: Any, **options: Any) -> Any:
        x, dims = args[0], args[1] if len(args) > 1 else None
        if call in _OF_RESULTS:
            dims = args[2]
        if not isinstance(x, DTensor):
            return call(*args, **options)
        own = dims if isinstance(dims, Sequence) else [dims]
        over = {d % x.ndim for d in own if d is not None} or {*range(x.ndim)}
        if over.isdisjoint(getattr(p, "dim", None) for p in x.placements):
            return call(*args, **options)
        return rule(*args, **options)

    return reduced


def _sum(x: Any, dims: Sequence[int] | None, keepdim: bool = True) -> Any:
    return summed(aten.sum.dim_IntList(x, dims, keepdim))


def _var_mean(
    x: Any,
    dims: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Any:
    dims = list(dims) if dims else list(range(x.ndim))
    count = math.prod(x.shape[d] for d in dims)
    mean = _sum(x, dims) / count
    squares = _sum((x - mean).square(), dims, keepdim)
    mean = mean if keepdim else mean.squeeze(dims)
    left = max(0, count - (1 if correction is None else correction))
    return squares / left, mean


def _var(x: Any, dims: Sequence[int] | None = None, **how: Any) -> Any:
    return _var_mean(x, dims, **how)[0]


def _log_softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    x = x.float() if half_to_float else x
    x = x - summed(_extreme(aten.amax.default)(x, [dim], True))
    return x - _sum(x.exp(), [dim]).log()


def _softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    x = x.float() if half_to_float else x
    e = (x - summed(_extreme(aten.amax.default)(x, [dim], True))).exp()
    return e / _sum(e, [dim])


def _softmax_backward(grad: Any, result: Any, dim: int, dtype: torch.dtype) -> Any:
    product = grad * result
    return (product - result * _sum(product, [dim])).to(dtype)


def _log_softmax_backward(grad: Any, result: Any, dim: int, dtype: torch.dtype) -> Any:
    return (grad - result.exp() * _sum(grad, [dim])).to(dtype)


def _logsumexp(x: Any, dims: Sequence[int], keepdim: bool = False) -> Any:
    largest = summed(_extreme(aten.amax.default)(x, dims, True))
    largest = largest.masked_fill(largest.abs() == math.inf, 0)
    result = _sum((x - largest).exp(), dims).log() + largest
    return result if keepdim else result.squeeze(list(dims))


def _extreme(call: OpOverload) -> Rule:
    """Reduce rows of a flattened batch as batch and tokens."""

    def extreme(x: Any, dims: Sequence[int] = (), keepdim: bool = False) -> Any:
        over = sorted({d % x.ndim for d in dims}) or list(range(x.ndim))
        strided = [p for p in x.placements if isinstance(p, StridedShard)]
        if not any(p.dim in over for p in strided):
            return call(x, dims, keepdim)
        (p,) = strided
        apart = x.unflatten(p.dim, (p.split_factor, -1))
        both = [d + (d > p.dim) for d in over] + [p.dim + 1]
        result = summed(call(apart, both, True)).squeeze(p.dim + 1)
        return result if keepdim else result.squeeze(over)

    return extreme


def _product(a: Any, b: Any) -> Any:
    """Multiply rows of a flattened batch where they are."""
    if not (isinstance(a, DTensor) and isinstance(b, DTensor)):
        return aten.mm.default(a, b)
    if not any(isinstance(p, StridedShard) for p in (*a.placements, *b.placements)):
        return aten.mm.default(a, b)
    a, b = summed(a), summed(b)
    cut = list(zip(a.placements, b.placements, strict=True))
    placements = [_of_product(x, y) for x, y in cut]
    if None in placements:
        return aten.mm.default(a, b)
    own = a._local_tensor, b._local_tensor
    work = [x.shape[0] * y.numel() for x, y in ((a, b), own)]
    with sharing_rows(a.device_mesh, placements, *work):
        local = aten.mm.default(*own)
    shape = torch.Size([a.shape[0], b.shape[1]])
    meta = TensorMeta(shape, contiguous_strides(shape), local.dtype)
    spec = DTensorSpec(a.device_mesh, tuple(placements), tensor_meta=meta)
    for rows in (a, b):  # a spec says more of strided shards: how they are read
        if rows.placements == spec.placements:
            spec = replace(rows._spec, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def _of_product(a: Any, b: Any) -> Any:
    if a.is_replicate() and b.is_replicate():
        return a
    dims = getattr(a, "dim", None), getattr(b, "dim", None)
    if dims == (0, None) and b.is_replicate():
        return a
    if dims == (None, 1) and a.is_replicate():
        return b
    factors = [getattr(p, "split_factor", 1) for p in (a, b)]
    return Partial() if dims == (1, 0) and factors[0] == factors[1] else None


_OF_RESULTS = (
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
)
_BY_SUMS: dict[Any, Rule] = {
    aten.var.correction: _var,
    aten.var_mean.correction: _var_mean,
    aten.std.correction: lambda *args, **how: _var(*args, **how).sqrt(),
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _log_softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten.logsumexp.default: _logsumexp,
    aten.amax.default: _extreme(aten.amax.default),
    aten.amin.default: _extreme(aten.amin.default),
}
RULES: dict[Any, Rule] = {
    **{call: _where_cut(call, rule) for call, rule in _BY_SUMS.items()},
    aten.mm.default: _product,
}
