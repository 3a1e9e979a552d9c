"""What a call of a mixer computes and moves, for prices and for torch's flop counter.

The function runs without data on a few tokens, and what it does is counted; the work of
a mixer grows with the number of tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from cpcompile.geometry.lengths import expected
from cpcompile.ops.mixers.mixer_call import MixerCall
from cpcompile.torch_private import pytree
from cpcompile.torch_private.fake_tensors import FakeTensorMode, TorchDispatchMode

_TOKENS = 128  # two chunks of most functions
_OF_BACKWARD = 2  # gradients of both operands of each product
Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


@dataclass(frozen=True)
class Work:
    """Floating point operations, and bytes that are read and written.

    is_counted: whether the function ran without data; else its operands are read.
    """

    flops: float
    bytes: float
    is_counted: bool = True


def shapes_of(tensors: Sequence[Tensor]) -> Shapes:
    """Return shapes and dtypes, with values for symbols."""
    return tuple((tuple(map(expected, x.shape)), x.dtype) for x in tensors)


@functools.lru_cache(maxsize=1024)
def forward_work(text: str, operands: Shapes) -> Work:
    """Return the work of a call's forward.

    A kernel that cannot run without data counts as reading its operands once.
    """
    call = MixerCall.of_text(text)
    dims = [call.mixer.tokens.get(name) for name in call.names]
    tokens = next(
        (
            shape[d]
            for (shape, _), d in zip(operands, dims, strict=True)
            if d is not None
        ),
        1,
    )
    few = min(tokens, _TOKENS)
    moved, flops = _Moved(), FlopCounterMode(display=False)  # type: ignore[no-untyped-call]
    try:
        with FakeTensorMode(), torch.no_grad(), moved, flops:
            call.run(
                [
                    torch.empty(_with_tokens(shape, dim, few), dtype=dtype)
                    for (shape, dtype), dim in zip(operands, dims, strict=True)
                ]
            )
    except Exception:  # whatever a kernel says to a tensor without data
        read = float(sum(math.prod(s) * d.itemsize for s, d in operands))
        return Work(0.0, read, is_counted=False)
    return Work(
        flops.get_total_flops() * tokens / few, float(moved.bytes) * tokens / few
    )


def register() -> None:
    """Register the formulas of cp::mixer; torch keeps them for the process."""

    @register_flop_formula(torch.ops.cp.mixer)
    def forward(tensors: Any, call: str, **_: Any) -> int:
        return _flops(tensors, call)

    @register_flop_formula(torch.ops.cp.mixer_backward)
    def backward(
        grads: Any,
        tensors: Any,
        graded: Any,
        needed: Any,
        call: str,
        token: Any = None,
        **_: Any,
    ) -> int:
        again = 1 if token is None else 0
        return (_OF_BACKWARD + again) * _flops(tensors, call)

    @register_flop_formula(torch.ops.cp.mixer_recorded)
    def recorded(tensors: Any, needed: Any, call: str, **_: Any) -> int:
        return _flops(tensors, call)


def _flops(tensors: Sequence[Sequence[int]], call: str) -> int:
    operands = tuple((tuple(map(int, x)), torch.float32) for x in tensors)
    return int(forward_work(call, operands).flops)


def _with_tokens(shape: tuple[int, ...], dim: int | None, tokens: int) -> list[int]:
    sizes = list(shape)
    if dim is not None:
        sizes[dim] = tokens
    return sizes


class _Moved(TorchDispatchMode):
    """A mode that adds up the bytes of operands and results, but for views."""

    bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            leaves = pytree.tree_leaves((args, kwargs, result))
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            self.bytes += sum(x.numel() * x.element_size() for x in tensors)
        return result
