"""Show what the passes made of a graph to whoever wants to look at both.

A watcher sees every graph that is compiled, before and after the passes, and may run
something else in the place of the compiled program. `cp.verify` is one: it runs both
graphs call by call to find the first call whose value differs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from .graph.context import Context
from .graph.nodes import sub_graph

CompiledGraph = Callable[..., Any]
NodePath = str
"""A node: the names of the checkpoint regions around it, and its own name: "a/b"."""


@dataclass(frozen=True)
class Rewrite:
    """One graph before and after the passes.

    replaced: for a node of the rewritten graph, the nodes whose readers read it now.
    """

    untouched: fx.GraphModule
    rewritten: fx.GraphModule
    ctx: Context
    replaced: dict[NodePath, set[NodePath]]


Watcher = Callable[[Rewrite, CompiledGraph], CompiledGraph]

_watchers: list[Watcher] = []


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Let a watcher see what is compiled inside of the block."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def watched(rewrite: Rewrite) -> Callable[[CompiledGraph], CompiledGraph]:
    """Return the function that hands a compiled graph to the watchers.

    Call it before the graph is compiled, because that changes the graph.
    """
    if not _watchers:
        return lambda compiled: compiled
    snapshot = Rewrite(
        untouched=copy.deepcopy(rewrite.untouched),
        rewritten=copy.deepcopy(rewrite.rewritten),
        ctx=rewrite.ctx,
        replaced=rewrite.replaced,
    )
    watchers = tuple(_watchers)

    def wrap(compiled: CompiledGraph) -> CompiledGraph:
        for watcher in watchers:
            compiled = watcher(snapshot, compiled)
        return compiled

    return wrap


@contextmanager
def replacements(gm: fx.GraphModule) -> Iterator[dict[NodePath, set[NodePath]]]:
    """Note which nodes get the readers of which others inside of the block."""
    replaced: dict[NodePath, set[NodePath]] = {}
    with ExitStack() as stack:
        for region, module in _modules(gm) if _watchers else ():

            def note(
                old: fx.Node, new: str, user: fx.Node, region: NodePath = region
            ) -> None:
                replaced.setdefault(region + new, set()).add(region + old.name)

            stack.enter_context(module._set_replace_hook(note))
        yield replaced


def _modules(
    gm: fx.GraphModule, region: NodePath = ""
) -> Iterator[tuple[NodePath, Any]]:
    """Yield the graph and its checkpoint regions, each after the names of its calls."""
    yield region, gm
    for node in gm.graph.nodes:
        inside = sub_graph(node)
        if inside is not None:
            yield from _modules(inside, f"{region}{node.name}/")
