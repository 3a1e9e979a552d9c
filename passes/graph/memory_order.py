"""Find the order in which the dimensions of a value lie in memory on one device.

Random numbers are drawn in the order of the memory, so that ranks that gather a tensor
to draw the numbers of one device have to bring it into this order first.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cpcompile.geometry.lengths import expected
from cpcompile.torch_private import pytree


def memory_order(value: Any) -> tuple[int, ...] | None:
    """Return the dimensions by their strides, the largest first.

    None if that is their order. `value` is what Dynamo saw, so that these are the
    strides that one device has; of several results the first one counts.
    """
    tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
    if not tensors:
        return None
    shape, strides = tensors[0].shape, tensors[0].stride()
    dims = [dim for dim, size in enumerate(shape) if expected(size) != 1]
    in_memory = sorted(dims, key=lambda dim: -expected(strides[dim]))
    if in_memory == dims:
        return None
    ones = (dim for dim in range(len(shape)) if dim not in dims)
    return (*ones, *in_memory)


def in_memory_order(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return `x`, copied if its dimensions do not lie in this order."""
    back = [order.index(dim) for dim in range(len(order))]
    return x.permute(order).contiguous().permute(back)
