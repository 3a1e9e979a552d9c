"""Annotate the calls that AOTAutograd traces with what only the tracing code knows.

A call on DTensors becomes calls on local tensors. How much larger the whole is, and so
whether the ranks share the work out or repeat it, cannot be seen in these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.fx as fx

# Private, seen in torch 2.13.
from torch.fx.experimental.proxy_tensor import get_proxy_mode

SHARE = "cp_share"
"""In node.meta: how many times the work of the node all ranks have to do together."""

_group: ContextVar[str | None] = ContextVar("sequence_group", default=None)


@contextmanager
def shares_counted_in(group: str) -> Iterator[None]:
    """Count shares of work, inside, among the ranks of a process group."""
    token = _group.set(group)
    try:
        yield
    finally:
        _group.reset(token)


def sequence_group() -> str | None:
    """Return the name of the group that shares the sequence, while it is traced."""
    return _group.get()


@contextmanager
def traced_nodes() -> Iterator[list[fx.Node]]:
    """Give a list that gets, at the end of the block, the nodes traced in it."""
    mode, nodes = get_proxy_mode(), list[fx.Node]()
    tracer = None if mode is None else mode.tracer
    graph = getattr(tracer, "graph", None)
    if graph is None or sequence_group() is None:
        yield nodes
        return
    last = next(iter(reversed(graph.nodes)), None)
    yield nodes
    node = graph._root.next if last is None else last.next
    while node.op != "root":
        nodes.append(node)
        node = node.next


@contextmanager
def sharing(share: float) -> Iterator[None]:
    """Mark what is traced inside: all ranks together do `share` times the work."""
    with traced_nodes() as nodes:
        yield
    for node in nodes:
        node.meta[SHARE] = share
