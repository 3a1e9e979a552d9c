"""Calls of Dynamo's graphs that make DTensors, and plain tensors of them."""

from __future__ import annotations

from enum import Enum

import torch.fx as fx
from torch.distributed.tensor import DTensor

from .nodes import fake_value


class MeshChange(Enum):
    """A call that makes a DTensor, changes its placements, or makes it plain."""

    FROM_LOCAL = "from_local"
    REDISTRIBUTE = "redistribute"
    TO_LOCAL = "to_local"
    FULL_TENSOR = "full_tensor"


_METHODS = [x.value for x in MeshChange if x is not MeshChange.FROM_LOCAL]


def mesh_change(node: fx.Node) -> MeshChange | None:
    """Return which MeshChange a node makes; None for any other node."""
    if node.target is DTensor.from_local:
        return MeshChange.FROM_LOCAL
    if node.op != "call_method" or node.target not in _METHODS:
        return None
    return MeshChange(node.target)


def local_source(node: fx.Node) -> fx.Node | None:
    """Return the tensor that a mesh change reads; its dimensions are the result's.

    None for any other node.
    """
    if mesh_change(node) is None:
        return None
    (source, *_) = node.args
    assert isinstance(source, fx.Node)
    assert fake_value(source).ndim == fake_value(node).ndim
    return source
