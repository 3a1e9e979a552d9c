"""Have DTensor send values of dtypes that no backend sends, and hand NaN on.

gloo and NCCL know no int16, uint16, uint32 or uint64, and gloo no float8 ("Invalid
scalar type", torch 2.13 to 2.15). Who moves a value needs its bits alone, so that it is
sent as another dtype of the same size. Integers are added and compared in a larger one.

torch.amax of one device is NaN if any entry is. An all-reduce with MAX or MIN is not:
gloo compares, so that a NaN stays only if it lies on the rank that begins, and NCCL
takes fmax and fmin (src/device/reduce_kernel.h of 2.28), which drop a NaN as long as
some rank has a number. Overflow checks and gradient clipping would read a number. So
each extreme is sent with a flag beside it, in one message: the extreme of the flags
says whether some rank has a NaN. The messages of extremes are twice as large for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

_SENT_AS = {
    torch.int16: torch.float16,
    torch.uint16: torch.float16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    **dict.fromkeys(
        (
            torch.float8_e4m3fn,
            torch.float8_e4m3fnuz,
            torch.float8_e5m2,
            torch.float8_e5m2fnuz,
            torch.float8_e8m0fnu,
        ),
        torch.uint8,
    ),
}
_ADDED_AS = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}


@functools.cache
def install() -> None:
    """Have gathers, exchanges and reductions of DTensors use these dtypes."""
    # Private, seen in torch 2.13 to 2.15.
    for kind in (Shard, _StridedShard):
        for name in ("_to_replicate_tensor", "_to_new_shard_tensor"):
            if name in vars(kind):
                setattr(kind, name, _moved(getattr(kind, name)))
    for name in ("_reduce_value", "_reduce_shard_value"):
        setattr(Partial, name, _added(getattr(Partial, name)))


def _moved(move: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(move)
    def moved(self: Any, local: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        sent_as = _SENT_AS.get(local.dtype)
        if sent_as is None:
            return move(self, local, *args, **kwargs)
        return move(self, local.view(sent_as), *args, **kwargs).view(local.dtype)

    return moved


def _added(add: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(add)
    def added(self: Any, tensor: Tensor, *args: Any) -> Tensor:
        added_as = _ADDED_AS.get(tensor.dtype)
        if added_as is None:
            return add(self, tensor, *args)
        return add(self, tensor.to(added_as), *args).to(tensor.dtype)

    return added


@functools.cache
def keep_nan() -> None:
    """Have every Partial of "max" and "min" keep NaN."""
    for name in ("_reduce_value", "_reduce_shard_value"):
        # Private, seen in torch 2.13 to 2.15.
        setattr(Partial, name, _with_flags(getattr(Partial, name)))


def _with_flags(reduce: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(reduce)
    def reduced(self: Any, tensor: Tensor, *args: Any) -> Tensor:
        if self.reduce_op not in ("max", "min") or not tensor.is_floating_point():
            return reduce(self, tensor, *args)
        sign = 1 if self.reduce_op == "max" else -1
        nan = tensor.isnan()
        numbers = tensor.masked_fill(nan, -sign * math.inf)
        # Last, so that the other dimensions stay where a shard is cut.
        both = torch.stack((numbers, sign * nan.to(tensor.dtype)), -1)
        numbers, flags = reduce(self, both, *args).unbind(-1)
        return numbers.masked_fill(flags != 0, math.nan)

    return reduced
