"""Keep DDPOptimizer from cutting the graphs of backend "cp".

Note [Graphs under DDP]
Where a graph is compiled while DDP's forward runs, Dynamo lets DDPOptimizer cut it
between the buckets of DDP's gradients. The backward is then several autograd nodes, and
DDP sends the gradients of one while the next is computed.

    forward  ->  submod_0, submod_1, submod_2      each compiled by itself

A piece of a model is no graph to shard. Its activations come in as plain tensors, whole
on every rank, so that all tokens are gathered between two pieces, and most pieces have
no attention by which their inputs could be inferred. DDPOptimizer also runs each piece
on fake tensors, to learn the strides of its results, and these have neither an owner
nor values that ranks could compare. So a graph of ours is one bucket, which is not cut:
its gradients leave all at once, when its backward ends.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.fx as fx

# Private: asked for by Dynamo in each compilation under DDP, seen in torch 2.13.
from torch._dynamo.backends.distributed import DDPOptimizer

from cpcompile.torch_patches.graph_breaks import is_ours


@functools.cache
def install() -> None:
    """Have DDPOptimizer leave the graphs of backend "cp" whole; called once."""
    original = DDPOptimizer.__init__

    @functools.wraps(original)
    def one_bucket_if_ours(
        self: DDPOptimizer,
        bucket_bytes_cap: int,
        backend_compile_fn: Callable[..., Any],
        first_bucket_cap: int | None = None,
    ) -> None:
        if is_ours(backend_compile_fn):
            bucket_bytes_cap = first_bucket_cap = sys.maxsize
        original(self, bucket_bytes_cap, backend_compile_fn, first_bucket_cap)

    DDPOptimizer.__init__ = one_bucket_if_ours  # type: ignore[method-assign]


def is_piece(gm: fx.GraphModule) -> bool:
    """Tell whether DDPOptimizer has cut a graph, for a backend that calls ours."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and reason.reason.startswith("DDPOptimizer")
