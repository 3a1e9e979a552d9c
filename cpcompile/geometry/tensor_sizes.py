"""Sizes of tensors in the call that a program is compiled for."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cpcompile.geometry.lengths import expected
from cpcompile.torch_private import pytree


def size_in_call(n: int | torch.SymInt) -> int:
    """Return the size that is expected; 0 for one that only the data tells."""
    if isinstance(n, torch.SymInt) and not n.node.has_hint():
        return 0
    return expected(n)


def shape_of(x: Tensor) -> tuple[int, ...]:
    """Return the sizes of x in this call."""
    return tuple(map(size_in_call, x.shape))


def elements_of(x: Tensor) -> int:
    """Return how many numbers a tensor has in this call."""
    return math.prod(shape_of(x))


def bytes_of(value: Any) -> int:
    """Return the bytes of a tensor, or of several together."""
    return sum(
        elements_of(x) * x.dtype.itemsize
        for x in pytree.tree_leaves(value)
        if isinstance(x, Tensor)
    )
