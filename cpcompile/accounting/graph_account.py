"""The account of a program, as data: what its ranks exchange, and who does the work.

An `Account` is made once, from the local graphs of forward and backward. `cp.explain`,
`cp.check` and the warnings are views of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")
Row = TypeVar("Row", "Exchange", "LineWork")


class GraphDirection(Enum):
    """One of the two graphs that autograd makes of one."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Kind(Enum):
    """A way in which ranks exchange tensors."""

    ALL_GATHER = "all-gather"
    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    MESSAGE = "message"  # from one rank to another
    BROADCAST = "broadcast"


class Purpose(Enum):
    """The reason why ranks exchange something."""

    ATTENTION = "attention"
    MIXER = "mixer"  # tokens for another dimension, along which a mixer is split
    NEIGHBOURS = "tokens of neighbours"  # that slices, shifts and windows read
    LAYOUT = "token layout"  # tokens move from one layout to another
    GRADIENT = "gradient"  # of an input of the graph, such as a parameter
    PARAMETER = "parameter"  # a sharded parameter is gathered
    RESULT = "result"  # leaves the graph whole
    OTHER_AXES = "other axes"  # of the mesh, such as tensor parallelism
    VALUE = "value"  # what a call of the program needs of other ranks


@dataclass(frozen=True, order=True)
class Line:
    """A line of the user's program; without a number where torch knows none."""

    file: str = ""
    number: int = 0
    function: str = ""

    def __str__(self) -> str:
        """Say where it is, with the file without its folders."""
        if not self.number:
            return "unknown line"
        return f"{self.file.rpartition('/')[2]}:{self.number}, in {self.function}"


@dataclass(frozen=True)
class Exchange:
    """All that one line has the ranks exchange in one way.

    what: the parameter or input, for gradients and parameters; else the module that the
        line is in, for several calls the first one's.
    calls: nodes of the graph. messages: what they send, as a profiler counts: every
        collective, and every message that arrives.
    bytes: bytes that this rank receives from others, padding included. An all-reduce
        counts as a reduce-scatter and an all-gather.
    at_most: whether a mask that is data may need fewer.
    """

    direction: GraphDirection
    kind: Kind
    purpose: Purpose
    line: Line
    what: str
    calls: int
    messages: int
    bytes: int
    at_most: bool = False


@dataclass(frozen=True)
class Joined:
    """Collectives of one kind that travel together, in buckets."""

    direction: GraphDirection
    kind: Kind
    calls: int
    buckets: int


@dataclass(frozen=True)
class LineWork:
    """Floating-point operations of one line: products, convolutions, attention.

    what: the module that the line is in, for several calls the first one's.
    flops: operations of this rank. whole_flops: operations of one device that computes
        everything.
    bytes: bytes of what the calls read and make, on this rank.
    planned: whether a plan has every rank do it, because that takes less time.
    """

    line: Line
    what: str
    calls: int
    flops: float
    whole_flops: float
    bytes: int
    planned: bool = False

    def repeated_flops(self, ranks: int) -> float:
        """Return the operations that the ranks together do beyond one device's."""
        return self.flops * ranks - self.whole_flops


@dataclass(frozen=True)
class Work:
    """The work of a graph, and how it is shared out; fields as in LineWork.

    repeated: lines whose work the ranks do more than once, most of it first.
    uncounted: operators of whose work nothing is known, such as custom kernels.
    """

    flops: float
    whole_flops: float
    ranks: int
    repeated: tuple[LineWork, ...] = ()
    uncounted: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """Work of all ranks over one device's: 1 if shared, their number if not."""
        return self.flops * self.ranks / self.whole_flops if self.whole_flops else 1.0


@dataclass(frozen=True)
class GraphAccount:
    """The account of one graph after autograd: a forward or a backward.

    exchanges: the largest first.
    saved_bytes: for a backward, of what the forward saves for it on this rank, beyond
        inputs of the graph.
    """

    direction: GraphDirection
    exchanges: tuple[Exchange, ...]
    work: Work
    joined: tuple[Joined, ...] = ()
    saved_bytes: int = 0

    def messages(self) -> dict[Kind, int]:
        """Count the messages of each kind that are sent when the graph runs once."""
        counts: dict[Kind, int] = {}
        for exchange in self.exchanges:
            before = counts.get(exchange.kind, 0)
            counts[exchange.kind] = before + exchange.messages
        for join in self.joined:
            counts[join.kind] -= join.calls - join.buckets
        return counts


@dataclass(frozen=True)
class Account:
    """The account of a program, or of a part of it: of several graphs together."""

    graphs: Sequence[GraphAccount]

    def exchanges(self, *purposes: Purpose) -> list[Exchange]:
        """Return what is sent for these purposes, or for all, the largest first."""
        rows = (x for graph in self.graphs for x in graph.exchanges)
        chosen = (x for x in rows if not purposes or x.purpose in purposes)
        return sorted(chosen, key=lambda x: -x.bytes)

    def received(self, *purposes: Purpose) -> int:
        """Return the bytes that a rank receives for these purposes, or for all."""
        return sum(x.bytes for x in self.exchanges(*purposes))

    def work(self, direction: GraphDirection | None = None) -> Work:
        """Return the work of all graphs, or of those of a direction, as one.

        Lines are added up, and without those whose work every rank does by a plan.
        """
        works = [x.work for x in self.graphs if direction in (None, x.direction)]
        ranks = max((x.ranks for x in works), default=1)
        rows = (row for work in works for row in work.repeated if not row.planned)
        lines = map(total, grouped(rows, lambda x: x.line))
        return Work(
            flops=sum(x.flops for x in works),
            whole_flops=sum(x.whole_flops for x in works),
            ranks=ranks,
            repeated=tuple(sorted(lines, key=lambda x: -x.repeated_flops(ranks))),
            uncounted=tuple(dict.fromkeys(x for y in works for x in y.uncounted)),
        )

    @property
    def saved_bytes(self) -> int:
        """Bytes that forwards save for backwards on this rank."""
        return sum(graph.saved_bytes for graph in self.graphs)


def grouped(rows: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Group rows by a key, in the order in which the keys come first."""
    groups: dict[Hashable, list[T]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def total(rows: Sequence[Row]) -> Row:
    """Add up the numbers of rows; all else is as in the first."""
    sums: dict[str, Any] = {}
    for field in fields(rows[0]):
        values = [getattr(x, field.name) for x in rows]
        if isinstance(values[0], int | float):
            add = any if isinstance(values[0], bool) else sum
            sums[field.name] = add(values)
    return replace(rows[0], **sums)
