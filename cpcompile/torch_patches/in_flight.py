"""Tensors whose collective is still running, as arguments of a compiled program.

The eager hooks of tensor parallelism return an AsyncCollectiveTensor. AOTAutograd takes
it for a subclass whose gradient is one too, and hands a plain gradient to the backward
of DTensor's redistribute, which fails: "'Tensor' object has no attribute
'_local_tensor'". Seen in torch 2.13 and 2.15, with backend="aot_eager" too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor


def arrived(x: Any) -> Any:
    """Return x, or the plain tensor that it becomes once its collective is done."""
    if not isinstance(x, AsyncCollectiveTensor):
        return x
    return _Arrived.apply(x)  # type: ignore[no-untyped-call]


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: AsyncCollectiveTensor) -> Tensor:
        whole: Tensor = x.trigger_wait()
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]
