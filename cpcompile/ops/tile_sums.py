"""Operators for tiles that add up the gradient of a weight in one place of memory.

    cp::add_product_   total += a @ b
    cp::after         a value that exists once the sums are complete

Inductor runs aten.addmm with a new result each time, so that two sums would exist at
once. AOTAutograd's partitioner may leave the last addition to the backward, and save
the logits of one tile for it, unless a result of the forward comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.library.custom_op("cp::add_product_", mutates_args=("total",))
def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a product in place: total [M, N] += a [M, K] @ b [K, N].

    A total of another dtype, as float32 for operands of bfloat16, gets the product
    rounded to theirs.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


@add_product_.register_fake
def _(total: Tensor, a: Tensor, b: Tensor) -> None:
    return None


@torch.library.custom_op("cp::after", mutates_args=())
def after(x: Tensor, sums: Sequence[Tensor]) -> Tensor:
    """Copy x, a small tensor; `sums` are only waited for."""
    return x.clone(memory_format=torch.contiguous_format)


@after.register_fake
def _(x: Tensor, sums: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
