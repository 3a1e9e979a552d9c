"""Programs that compute nothing: their results are zeros of the right shapes.

Large zeros are memory that the system hands out when it is written to, not before; so
that a result of any size takes none.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.tensor_sizes import shape_of, size_in_call

_LARGE = 2**20  # bytes; smaller ones would waste pages


def zeros_like(x: Tensor, device: torch.device | None = None) -> Tensor:
    """Return zeros of the sizes, strides and dtype of `x`, which may be symbols."""
    shape, strides = shape_of(x), [size_in_call(n) for n in x.stride()]
    size = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory = _zeros(size if all(shape) else 0, x.dtype, device or x.device)
    return memory.as_strided(shape, strides)


def returns_zeros(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return a compiler's function for a graph after autograd that computes nothing."""
    (output,) = module.graph.output_node().args
    nodes: Any = output
    results = [x.meta["val"] if isinstance(x, fx.Node) else x for x in nodes]

    def run(args: list[Any]) -> list[Any]:
        args.clear()
        return [_nothing_like(x) for x in results]

    run._boxed_call = True  # type: ignore[attr-defined]  # how AOTAutograd calls it
    return run


def _nothing_like(x: Any) -> Any:
    if isinstance(x, Tensor):
        return zeros_like(x)
    return size_in_call(x) if isinstance(x, torch.SymInt) else x


def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    count = size * dtype.itemsize
    if device.type != "cpu" or count < _LARGE:
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, count), dtype=dtype, count=size)
