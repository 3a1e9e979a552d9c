"""Calls of Dynamo's graphs that make DTensors, and plain tensors of them."""

from __future__ import annotations

from enum import Enum

import torch.fx as fx
from torch.distributed.tensor import DTensor

from .nodes import fake_value


class MeshChange(Enum):
    """What a call does to a DTensor besides computing."""

    FROM_LOCAL = "from_local"
    REDISTRIBUTE = "redistribute"
    TO_LOCAL = "to_local"


def mesh_change(node: fx.Node) -> MeshChange | None:
    """Which of them a node calls; None for any other."""
    if node.target is DTensor.from_local:
        return MeshChange.FROM_LOCAL
    if node.op != "call_method":
        return None
    if node.target == "redistribute":
        return MeshChange.REDISTRIBUTE
    return MeshChange.TO_LOCAL if node.target == "to_local" else None


def local_source(node: fx.Node) -> fx.Node | None:
    """The tensor that such a call reads, whose dimensions are those of the result."""
    if mesh_change(node) is None:
        return None
    (source, *_) = node.args
    assert isinstance(source, fx.Node)
    assert fake_value(source).ndim == fake_value(node).ndim
    return source
