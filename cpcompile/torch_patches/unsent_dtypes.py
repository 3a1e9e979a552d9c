"""Have DTensor send values of dtypes that no backend sends.

gloo and NCCL know no int16, uint16, uint32 or uint64, and gloo no float8 ("Invalid
scalar type", torch 2.13 to 2.15). Who moves a value needs its bits alone, so that it is
sent as another dtype of the same size. Integers are added and compared in a larger one.
"""

from __future__ import annotations

import functools
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
