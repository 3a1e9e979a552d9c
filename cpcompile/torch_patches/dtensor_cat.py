"""Let torch.cat on DTensors ignore 1-D empty tensors, as it does on plain ones.

Key/value caches begin as such an empty tensor, so that every decoder of transformers
concatenates one with its first keys; DTensor tries to shard it like the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.torch_private.distributed import by_dtensor

aten = torch.ops.aten


def register() -> None:
    """Install the handler for aten.cat."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers[aten.cat.default] = cat_handler


def cat_handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Call aten.cat(tensors, dim) without the tensors that do not count."""
    tensors, rest = args[0], args[1:]
    nonempty = [x for x in tensors if tuple(x.shape) != (0,)] or tensors[:1]
    if len(nonempty) == 1:
        return nonempty[0].clone()  # type: ignore[no-any-return]
    return by_dtensor(op, (nonempty, *rest), kwargs)  # type: ignore[no-any-return]
