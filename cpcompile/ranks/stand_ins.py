"""Tensors that stand for the tokens of all ranks while Dynamo traces a module.

A module in the local view gets its tokens as DTensors on the axis of the sequence, and
Dynamo sees their whole shape. The hooks of tensor parallelism turn what a module gets
into DTensors on their own axis, and take any DTensor for one of theirs. There Dynamo
sees a stand-in: a plain tensor of one element, expanded to the shape that the module
would see without context parallelism. The compiled program takes what it stands for.
Code that reads a stand-in otherwise reads NaN, or an index that is out of range.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cpcompile.ranks.layout_marks import layout_of, mark

_STANDS_FOR = "_cp_stands_for"


def stand_in(tokens: DTensor, chunks: DeviceMesh | None = None) -> Tensor:
    """Make a stand-in for `tokens`; of `chunks` each rank has another of its tokens."""
    local = tokens._local_tensor
    value: Any = float("nan")
    if not (local.is_floating_point() or local.is_complex()):
        value = local.dtype == torch.bool or torch.iinfo(local.dtype).min
    expanded = local.new_full((), value).expand(tokens.shape)
    setattr(expanded, _STANDS_FOR, (tokens, chunks))
    mark(expanded, layout_of(tokens))
    return expanded.requires_grad_(tokens.requires_grad)


def stands_for(x: Any) -> Any:
    """Return the DTensor that x stands for; x itself if it is no stand-in."""
    found: tuple[DTensor, DeviceMesh | None] | None = getattr(x, _STANDS_FOR, None)
    return x if found is None else found[0]


def chunks_of(x: Any) -> DeviceMesh | None:
    """Return the mesh whose ranks have chunks of what x stands for, if they have."""
    found: tuple[DTensor, DeviceMesh | None] | None = getattr(x, _STANDS_FOR, None)
    return None if found is None else found[1]
