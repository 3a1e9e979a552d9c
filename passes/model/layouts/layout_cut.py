"""Find where to change the layout, so that a graph costs least: a minimum cut.

Every value with tokens is contiguous or laid out. A vertex that is on the other side
than its producer costs a relayout of the value, once for all consumers on that side;
an attention call costs its time in the layout of its side. The cut between the source
(contiguous) and the sink (laid out) with the least capacity is the cheapest choice for
the whole graph, and every relayout that it does not cross is gone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

SOURCE, SINK = "contiguous", "laid out"


class LayoutCut:
    """A flow network; vertices are whatever is hashable, except SOURCE and SINK."""

    def __init__(self) -> None:
        import networkx  # type: ignore[import-untyped]  # slow to import; has no types

        self._graph = networkx.DiGraph()
        self._graph.add_nodes_from((SOURCE, SINK))

    def add(
        self,
        vertex: Hashable,
        contiguous: float | None = 0.0,
        laid_out: float | None = 0.0,
    ) -> None:
        """Add a vertex and its seconds on either side; None if it cannot be there."""
        self._edge(SOURCE, vertex, laid_out)
        self._edge(vertex, SINK, contiguous)

    def same(self, one: Hashable, other: Hashable) -> None:
        """Keep two vertices on one side."""
        self._edge(one, other, None)
        self._edge(other, one, None)

    def feed(
        self,
        producer: Hashable,
        consumers: Iterable[Hashable],
        name: Hashable,
        seconds: float | None,
    ) -> None:
        """Charge `seconds`, once, if consumers are on another side than the producer.

        name: of the value.
        seconds: None if the value cannot be relaid.
        """
        laid_out, contiguous = (name, SINK), (name, SOURCE)
        self._edge(producer, laid_out, seconds)
        self._edge(contiguous, producer, seconds)
        for consumer in consumers:
            self._edge(laid_out, consumer, None)
            self._edge(consumer, contiguous, None)

    def solve(self) -> set[Hashable]:
        """Return the vertices that are laid out; as few as possible among the cheapest.

        Raises: networkx's NetworkXUnbounded if there is no choice without a None.
        """
        import networkx

        _, (_, laid_out) = networkx.minimum_cut(self._graph, SOURCE, SINK)
        return set(laid_out)

    def _edge(self, start: Hashable, end: Hashable, seconds: float | None) -> None:
        if seconds is None:
            self._graph.add_edge(start, end)  # without a capacity: without a limit
        elif round(seconds * 1e15):
            # Integers, in femtoseconds: a flow of floats need not end.
            self._graph.add_edge(start, end, capacity=round(seconds * 1e15))
