"""Calls on tensors without data, with each operand cut on a mesh, a sum, or whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from cpcompile.geometry.lengths import expected
from cpcompile.torch_private import pytree
from cpcompile.torch_private.fake_tensors import enable_python_dispatcher

from ..graph.calls import function_of
from ..graph.nodes import attribute_value, expected_shape, fake_value
from ..graph.sequence_tokens import TokenDim


@dataclass(frozen=True)
class ShapedCall:
    """A call, with the leaves of its arguments.

    index: which one of several results counts.
    """

    target: Any
    values: list[Any]
    spec: Any
    index: int | None = None

    @property
    def key(self) -> Any:
        """Key that is equal for equal calls, because layers repeat; None if unknown."""
        key = self.target, str(self.spec), tuple(map(_typed, self.values)), self.index
        try:
            hash(key)
        except TypeError:
            return None
        return None if any(isinstance(x, Tensor) for x in self.values) else key

    def operands(
        self, mesh: DeviceMesh, roles: Sequence[TokenDim | Placement | None]
    ) -> list[Any]:
        """Return the leaves of the arguments, with the tensors on a mesh."""
        return [
            x.on(mesh, role) if isinstance(x, TensorShape) else x
            for x, role in zip(self.values, roles, strict=True)
        ]

    def run(self, operands: list[Any]) -> Any:
        """Make the call on these leaves."""
        args, kwargs = pytree.tree_unflatten(operands, self.spec)
        with enable_python_dispatcher():
            result = self.target(*args, **kwargs)
        return result if self.index is None else result[self.index]


def _typed(x: Any) -> Any:
    """Return a leaf as a part of a key, in which 1, 1.0 and True are not equal."""
    return (slice, repr(x)) if isinstance(x, slice) else (type(x), x)


def shaped_call(
    node: fx.Node, index: int | None = None
) -> tuple[ShapedCall, list[Any]]:
    """Return what a node calls, and the leaves of its arguments, nodes among them."""
    leaves, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
    return ShapedCall(
        function_of(node), [without_data(x) for x in leaves], spec, index
    ), leaves


@dataclass(frozen=True)
class TensorShape:
    """The shape, strides, dtype and device of a global tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> TensorShape:
        """Return the shape of `x`, with values for symbols."""
        stride = tuple(expected(n) for n in x.stride())
        return cls(expected_shape(x), stride, x.dtype, x.device)

    def on(self, mesh: DeviceMesh, role: TokenDim | Placement | None) -> DTensor:
        """Return a DTensor of this shape, cut along a dimension or placed as `role`."""
        shape = list(self.shape)
        placement: Placement = Replicate()
        if isinstance(role, TokenDim):
            shape[role.dim] = -(-shape[role.dim] // mesh.size())
            placement = role.placement
        elif role is not None:
            placement = role
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
    """Return a value without symbols and data; a graph that a call runs is kept."""
    if isinstance(leaf, fx.Node) and leaf.op == "get_attr":
        value = attribute_value(leaf)
    elif isinstance(leaf, fx.Node):
        value = (
            fake_value(leaf) if "example_value" in leaf.meta else leaf.meta.get("val")
        )
    else:
        value = leaf
    if isinstance(value, Tensor):
        return TensorShape.of(value)
    if isinstance(value, slice):  # its ends may be sizes of the graph
        return slice(*map(without_data, (value.start, value.stop, value.step)))
    if isinstance(value, tuple | list):  # sizes, or several results
        return type(value)(map(without_data, value))
    return expected(value) if isinstance(value, torch.SymInt) else value
