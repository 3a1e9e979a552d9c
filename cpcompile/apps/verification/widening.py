"""Compute in float64 although a model asks for less.

A router that computes its weights by `softmax(x, dtype=torch.float32)` adds them, in a
model of float64, to values of another dtype, which torch refuses. So casts and new
tensors become float64. Products of grouped rows, by which experts run, have no kernel
for float64 and are computed group by group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cpcompile.apps.verification.bounds import whole
from cpcompile.torch_private import pytree

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_NARROWING = ("float", "bfloat16", "half")  # methods


class Widened(TorchFunctionMode):
    """A mode in which calls of torch compute in float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        args, kwargs = pytree.tree_map(wide_dtype, (tuple(args), dict(kwargs or {})))
        return wide_function(func)(*args, **kwargs)


def wide_function(function: Any) -> Any:
    """Return the function that computes in float64 what `function` of torch does."""
    return _WIDE.get(function, function)


def wide_method(name: str) -> str:
    """Return the tensor method that does in float64 what the method `name` does."""
    return "double" if name in _NARROWING else name


def wide_dtype(x: Any) -> Any:
    """Return float64 for a narrower floating-point dtype; anything else as it is."""
    return torch.float64 if isinstance(x, torch.dtype) and x in _NARROW else x


def widened(x: Any) -> Any:
    """Convert a floating-point tensor to float64, differentiably; keep others as is."""
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.double()
    return x


def grouped_product(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute torch.nn.functional.grouped_mm, for any dtype.

    Args:
        a: [rows, K] for groups of rows, else [groups, M, K].
        b: [groups, K, N].
        offs: [groups], the ends of the groups of rows; rows after the last one are 0.
        bias: [groups, N] or None.

    Raises: NotImplementedError for groups of columns.
    """
    if b.dim() != 3 or (a.dim() == 2) != (offs is not None):
        raise NotImplementedError(
            f"grouped_mm of {list(a.shape)} and {list(b.shape)} in float64; needed "
            "groups of rows"
        )
    if offs is None:
        product = a @ b
        product = product if bias is None else product + bias.unsqueeze(1)
    else:
        ends = whole(offs).tolist()
        parts = [
            part @ b[i] if bias is None else part @ b[i] + bias[i]
            for i, part in enumerate(a[: ends[-1]].tensor_split(ends[:-1]))
        ]
        parts.append(a.new_zeros(a.shape[0] - ends[-1], b.shape[2]))
        product = torch.cat(parts)
    return product if out_dtype is None else product.to(out_dtype)


_WIDE: dict[Any, Any] = {
    torch._grouped_mm: grouped_product,
    F.grouped_mm: grouped_product,
    **{getattr(Tensor, name): Tensor.double for name in _NARROWING},
}
