"""Passes over a graph, and the findings that each declares to read and write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch.fx as fx

C = TypeVar("C", contravariant=True)


class GraphPass(Protocol[C]):
    """A pass that rewrites a graph in place and returns the number of rewrites.

    reads, writes: names of the fields of `Findings` that it uses.
    """

    __name__: str
    reads: frozenset[str]
    writes: frozenset[str]

    def __call__(self, graph: fx.Graph, ctx: C, /) -> int:
        """Run the pass; `ctx` is all that it knows in addition to the graph."""
        ...


def graph_pass(
    *, reads: tuple[str, ...] = (), writes: tuple[str, ...] = ()
) -> Callable[[Callable[[fx.Graph, C], int]], GraphPass[C]]:
    """Mark a function as a pass that reads and writes these findings."""

    def mark(function: Callable[[fx.Graph, C], int]) -> GraphPass[C]:
        marked: Any = function
        marked.reads, marked.writes = frozenset(reads), frozenset(writes)
        return cast("GraphPass[C]", marked)

    return mark


@dataclass(frozen=True)
class PassRun:
    """The record of what one pass did."""

    name: str
    rewrites: int
    seconds: float
