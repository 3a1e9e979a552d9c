"""Keeps Inductor from writing into operands of functions in the backward (torch 2.13).

    def block(args):                 # called for every layer
        x, w, total = args           # w, if saved for the backward, may be overwritten
        return total + x @ w         # written into total

What the forward saved, and nobody reads again, the backward may overwrite: Inductor
knows such inputs by their numbers. It also takes these numbers for those of operands
of a function that the backward calls. The caller, which may read the operand later, or
hands its memory to somebody else, knows nothing of it, and values change under way.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any


@functools.cache
def install() -> None:
    """Put the mend in; called before Inductor compiles a graph."""
    lowering: Any = importlib.import_module("torch._inductor.graph").SubgraphLowering
    before = lowering.__init__

    @functools.wraps(before)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        self.bw_donated_idxs = None

    lowering.__init__ = __init__
