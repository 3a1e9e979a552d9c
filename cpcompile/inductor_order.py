"""Keeps the cp:: operators in one order with the collectives of a compiled graph.

Inductor orders nodes by their data and by the memory they need, and keeps only what it
knows as collectives in the order of the graph. Where shards are uneven, sizes and so
the order differ from rank to rank; an attention operator that moves past an all-reduce
on one rank only is a deadlock. So it is made known as what it is.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
from typing import Any

# Private interface of Inductor, seen in torch 2.13.
from torch._inductor import comms, ir
from torch._inductor.scheduler import BaseSchedulerNode


@functools.cache
def cache_tag() -> str:
    """Tells Inductor's cache apart from one that was filled without this module.

    The cache does not see how nodes are ordered; a rank with an old entry would wait
    for the others forever.
    """
    source = pathlib.Path(__file__).read_bytes()
    return f"cpcompile {hashlib.sha256(source).hexdigest()[:12]}"


@functools.cache
def install() -> None:
    """Let Inductor's ordering of collectives include the cp:: operators."""
    original = comms.contains_collective

    @functools.wraps(original)
    def contains_collective(
        snode: BaseSchedulerNode, *args: Any, **kwargs: Any
    ) -> bool:
        return _is_cp_operator(snode) or original(snode, *args, **kwargs)

    comms.contains_collective = contains_collective


def _is_cp_operator(snode: BaseSchedulerNode) -> bool:
    op = getattr(snode.node, "op_overload", None)
    is_call = isinstance(snode.node, ir.FallbackKernel)
    return is_call and getattr(op, "namespace", "") == "cp"
