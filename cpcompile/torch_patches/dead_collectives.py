"""Drop collectives, and calls before them, that a backward would repeat for nobody.

What the partitioner of AOTAutograd saves for the backward depends on sizes, and so on
the rank where shards are uneven. Into the backward go all calls that can be made from
what is saved; those that nothing reads are dropped, but never a collective, which
counts as having effects, nor what it reads. So one rank may repeat an all-reduce of the
forward, or attention before an all-gather, that the others do not: a deadlock. torch's
`default_partition` drops such collectives itself, but not what they read; its min-cut
partitioner, which compilers use, drops nothing (torch 2.13 to 2.15).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import fx
from torch._functorch import partitioners  # private: what both partitioners end with

Partition = tuple[fx.GraphModule, fx.GraphModule]

_seen: ContextVar[list[Partition] | None] = ContextVar("partitions", default=None)


@functools.cache
def install() -> None:
    """Fix the partitioner; called before AOTAutograd is."""
    original = partitioners._extract_fwd_bwd_modules

    @functools.wraps(original)
    def extract(*args: Any, **kwargs: Any) -> Partition:
        modules: Partition = original(*args, **kwargs)
        for module in modules:
            module.graph.eliminate_dead_code(is_impure_node=_has_effects)
        recorded = _seen.get()
        if recorded is not None:
            # Copies: Inductor changes the graphs, but not where it finds them compiled.
            forward, backward = map(_copy, modules)
            recorded.append((forward, backward))
        return modules

    partitioners._extract_fwd_bwd_modules = extract


@contextmanager
def partitions() -> Iterator[list[Partition]]:
    """List the forward and the backward of all that is compiled inside."""
    recorded: list[Partition] = []
    outer, token = _seen.get(), _seen.set(recorded)
    try:
        yield recorded
    finally:
        _seen.reset(token)
        if outer is not None:
            outer.extend(recorded)


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)


def _has_effects(node: fx.Node) -> bool:
    if getattr(node.target, "namespace", None) == "_c10d_functional":
        return False
    return node.is_impure()
