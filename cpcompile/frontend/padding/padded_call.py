"""Call a program of P tokens for S <= P tokens: pad arguments and cut results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cpcompile.frontend.padding.padded_symbol import rounded_up
from cpcompile.passes.graph.sequence_tokens import Tokens


@dataclass
class PaddedCalls:
    """Pad the arguments and cut the results of calls of a program of P tokens.

    dims: the token dimensions of an input, by the input's number.
    results: example values of the results, of the length that was compiled.
    tokens: where the tokens of each result are; n for a result that is the number
        S + n; None for a result that is not cut.
    device: the device type of the program.
    """

    dims: dict[int, list[int]]
    ranks: int
    results: Sequence[Any]
    tokens: Sequence[Tokens | int | None]
    device: str

    def around(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a program of P tokens as one for the caller's tokens."""
        place, dims = next(iter(self.dims.items()))
        in_order = [
            x is None or not isinstance(r, Tensor) or r.is_contiguous()
            for x, r in zip(self.tokens, self.results, strict=True)
        ]

        def run(*args: Any) -> tuple[Any, ...]:
            length = args[place].shape[dims[0]]
            padded = rounded_up(length, self.ranks)
            padded_args = list(args)
            for i, along in self.dims.items():
                for dim in along:
                    padded_args[i] = _lengthened(padded_args[i], dim, padded - length)
            real = torch.tensor(length, device=self.device)
            results = program(*padded_args, real, padded)
            return tuple(
                x if t is None or padded == length else _cut(x, t, length, plain)
                for x, t, plain in zip(results, self.tokens, in_order, strict=True)
            )

        return run


def _lengthened(x: Tensor, dim: int, by: int) -> Tensor:
    """Append `by` copies of x's last entry along `dim`; differentiable."""
    if not by:
        return x
    sizes = list(x.shape)
    sizes[dim] = by
    return torch.cat([x, x.narrow(dim, x.shape[dim] - 1, 1).expand(sizes)], dim)


def _cut(x: Any, tokens: Tokens | int, length: int, contiguous: bool) -> Any:
    """Cut a result to what comes from the first `length` tokens; differentiable."""
    if isinstance(tokens, int):
        return length + tokens
    axis, count = tokens.axis, length + tokens.extra
    if tokens.is_whole:
        part = x.narrow(axis.dim, 0, count)
    else:
        parts = x.unflatten(axis.dim, (axis.outer, -1, axis.inner))
        part = parts.narrow(axis.dim + 1, 0, count).flatten(axis.dim, axis.dim + 2)
    if contiguous:
        return part.contiguous()
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim])
    back = sorted(range(x.dim()), key=order.__getitem__)
    return part.permute(order).contiguous().permute(back)
