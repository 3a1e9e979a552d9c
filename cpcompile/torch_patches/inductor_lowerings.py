"""Fix two of Inductor's lowerings (torch 2.13 to 2.15).

- It takes the number of ranks of an all-gather for an operand, with which booleans are
  promoted to int64: eight times the bytes, and later calls on the result, which expect
  booleans, fail in code generation.
- It asks the backward of a convolution for the order of strides by their values, which
  fixes every size that is a symbol. Such a backward is the call of aten, as it is
  without an autotuner's templates.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch


@functools.cache
def install() -> None:
    """Put the fixes in; called before Inductor compiles a graph."""
    lowerings = importlib.import_module("torch._inductor.lowering").lowerings
    call = torch.ops._c10d_functional.all_gather_into_tensor
    for op in (call, call.default):
        unpromoted = getattr(lowerings.get(op), "__wrapped__", None)
        if unpromoted is not None:
            lowerings[op] = _unpromoted(lowerings[op], unpromoted)
    convolutions = importlib.import_module("torch._inductor.kernel.conv")
    aten = getattr(convolutions, "aten_convolution_backward_fallback", None)
    op = torch.ops.aten.convolution_backward.default
    if aten is not None and op in lowerings:
        lowerings[op] = _of_any_size(lowerings[op], aten)


def _unpromoted(promoting: Any, unpromoted: Any) -> Any:
    @functools.wraps(promoting)
    def all_gather(x: Any, *rest: Any) -> Any:
        lower = unpromoted if x.get_dtype() is torch.bool else promoting
        return lower(x, *rest)

    return all_gather


def _of_any_size(guarding: Any, aten: Any) -> Any:
    @functools.wraps(guarding)
    def convolution_backward(grad: Any, x: Any, *rest: Any, **named: Any) -> Any:
        numbers = all(isinstance(n, int) or n.is_number for n in grad.get_size())
        return (guarding if numbers else aten)(grad, x, *rest, **named)

    return convolution_backward
