"""A trace of all ranks for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cpcompile.reporting.tracing.events import LANES, Event


def chrome_trace(
    ranks: Sequence[Sequence[Event]],
    about: Sequence[str] = (),
    ahead: Sequence[float] | None = None,
) -> str:
    """Return the events of all ranks as JSON: a process per rank, a thread per lane.

    about: lines that the trace carries along, such as a table of the calls.
    ahead: by how many microseconds each rank's clock is ahead; None: it is one clock.
    """
    zeros = [0.0] * len(ranks) if ahead is None else ahead
    starts = [
        x.start - n for events, n in zip(ranks, zeros, strict=True) for x in events
    ]
    first = min(starts, default=0.0)
    entries: list[dict[str, Any]] = []
    for rank, (events, early) in enumerate(zip(ranks, zeros, strict=True)):
        entries.append(_named("process_name", f"rank {rank}", rank))
        entries.append(
            {"ph": "M", "name": "process_sort_index", "pid": rank}
            | {"args": {"sort_index": rank}}
        )
        for number, lane in enumerate(LANES):
            entries.append(_named("thread_name", lane, rank, number))
            entries.append(
                {"ph": "M", "name": "thread_sort_index", "pid": rank}
                | {"tid": number, "args": {"sort_index": number}}
            )
        entries += [
            {
                "ph": "X",
                "name": x.name,
                "cat": x.lane,
                "pid": rank,
                "tid": LANES.index(x.lane),
                "ts": round(x.start - early - first, 3),
                "dur": round(x.duration, 3),
            }
            for x in events
        ]
    trace = {"displayTimeUnit": "ms", "traceEvents": entries}
    return json.dumps(trace | {"otherData": {"about": list(about)}})


def _named(what: str, name: str, rank: int, thread: int = 0) -> dict[str, Any]:
    fields = {"ph": "M", "name": what, "pid": rank, "tid": thread}
    return fields | {"args": {"name": name}}
