"""The graph that Dynamo makes of a function, before any pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx


def dynamo_graph(fn: Callable[..., Any], *inputs: Any) -> fx.GraphModule:
    """Trace a function as a whole; the graph has example values."""
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> fx.GraphModule:
        found.append(gm)
        return gm

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, fullgraph=True)(*inputs)
    (gm,) = found
    return gm
