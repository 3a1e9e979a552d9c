"""Lets Inductor gather booleans as booleans.

Its lowering of an all-gather takes the number of ranks for an operand (torch 2.13 to
2.15), with which booleans are promoted to int64: eight times the bytes, and later
calls on the result, which expect booleans, fail in code generation.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch


@functools.cache
def install() -> None:
    """Pass the promotion of types by; called before Inductor compiles a graph."""
    lowerings = importlib.import_module("torch._inductor.lowering").lowerings
    call = torch.ops._c10d_functional.all_gather_into_tensor
    for op in (call, call.default):
        unpromoted = getattr(lowerings.get(op), "__wrapped__", None)
        if unpromoted is not None:
            lowerings[op] = _unpromoted(lowerings[op], unpromoted)


def _unpromoted(promoting: Any, unpromoted: Any) -> Any:
    @functools.wraps(promoting)
    def all_gather(x: Any, *rest: Any) -> Any:
        lower = unpromoted if x.get_dtype() is torch.bool else promoting
        return lower(x, *rest)

    return all_gather
