"""Hand NaN on from every rank where DTensor combines maxima or minima.

torch.amax of one device is NaN if any entry is. An all-reduce with MAX or MIN is not:
gloo compares, so that a NaN stays only if it lies on the rank that begins, and NCCL
takes fmax and fmin (src/device/reduce_kernel.h of 2.28), which drop a NaN as long as
some rank has a number. Overflow checks and gradient clipping would read a number.

Each extreme is sent with a flag beside it, in one message: the extreme of the flags
says whether some rank has a NaN. The messages of extremes are twice as large for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial


@functools.cache
def install() -> None:
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
