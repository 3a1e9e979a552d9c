"""Keep Inductor from writing into operands of functions in the backward.

    backward(primals, x, total, ...)     # numbers 1 and 3 may be overwritten
    def block(x, w, bias, total):        # called for every layer
        return total + x @ w + bias      # written into total, which is its number 3

The backward may overwrite what the forward saved and nobody reads again: Inductor
knows such inputs by their numbers. It takes the same numbers for operands of a function
that the backward calls (torch 2.13, 2.15). The caller knows nothing of it, and hands
the memory of an operand to somebody else, while the result still lies in it.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any


@functools.cache
def install() -> None:
    """Put the fix in; called before Inductor compiles a graph."""
    lowering: Any = importlib.import_module("torch._inductor.graph").SubgraphLowering
    before = lowering.__init__

    @functools.wraps(before)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        self.bw_donated_idxs = None

    lowering.__init__ = __init__
