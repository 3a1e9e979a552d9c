"""Calls on tensors without data, each argument split on a mesh or whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils import _pytree as pytree

from cpcompile.geometry.lengths import expected

from ..graph.calls import function_of
from ..graph.nodes import attribute_value, expected_shape, fake_value
from ..graph.sequence_tokens import TokenDim


@dataclass(frozen=True)
class ShapedCall:
    """A call, with the leaves of its arguments.

    index: of several results, which one.
    """

    target: Any
    values: list[Any]
    spec: Any
    index: int | None

    @property
    def key(self) -> Any:
        """Equal for equal calls, because layers repeat; None if that cannot be told."""
        plain = (TensorShape, int, float, bool, str, type(None))
        others = (torch.dtype, torch.device)
        if any(not isinstance(x, (*plain, *others)) for x in self.values):
            return None
        typed = tuple((type(x), x) for x in self.values)
        return self.target, str(self.spec), typed, self.index

    def on(self, mesh: DeviceMesh, split: list[TokenDim | None]) -> Any:
        """The result on tensors of a mesh."""
        leaves = [
            x.on(mesh, dim) if isinstance(x, TensorShape) else x
            for x, dim in zip(self.values, split, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        with enable_python_dispatcher():
            result = self.target(*args, **kwargs)
        return result if self.index is None else result[self.index]


def shaped_call(
    node: fx.Node, index: int | None = None
) -> tuple[ShapedCall, list[Any]]:
    """What a node calls, and the leaves of its arguments, nodes among them."""
    leaves, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
    return ShapedCall(
        function_of(node), [without_data(x) for x in leaves], spec, index
    ), leaves


@dataclass(frozen=True)
class TensorShape:
    """The shape of a global tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def on(self, mesh: DeviceMesh, dim: TokenDim | None) -> DTensor:
        """A DTensor of this shape, split on `dim`."""
        shape = list(self.shape)
        if dim is not None:
            shape[dim.dim] //= mesh.size()
        placement: Placement = Replicate() if dim is None else dim.placement
        order = sorted(range(len(shape)), key=lambda d: -self.stride[d])
        local = torch.empty_permuted(shape, order, dtype=self.dtype, device=self.device)
        return DTensor.from_local(
            local,
            mesh,
            [placement],
            run_check=False,
            shape=torch.Size(self.shape),
            stride=self.stride,
        )


def without_data(leaf: Any) -> Any:
    """A value without symbols, and without data; for graphs that calls run, these."""
    if isinstance(leaf, fx.Node) and leaf.op == "get_attr":
        value = attribute_value(leaf)
    else:
        value = fake_value(leaf)
    if isinstance(value, Tensor):
        return TensorShape(
            expected_shape(value),
            tuple(expected(n) for n in value.stride()),
            value.dtype,
            value.device,
        )
    if isinstance(value, tuple | list):  # sizes, or several results
        return type(value)(map(without_data, value))
    return expected(value) if isinstance(value, torch.SymInt) else value
