"""Record one step with torch.profiler on every rank, and merge what all ranks recorded.

A step begins with a call of the program's first graph and ends with the next one, so
that the backward is in it. The first steps compile and warm up, and are not recorded.
"""

from __future__ import annotations

import atexit
import json
import logging
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup

from cpcompile.logs import warn_once
from cpcompile.ops.comm.communication import SPAN

log = logging.getLogger(__name__)

WARM_UP_STEPS = 2
_SETTING = "cpcompile.config.profile"
_NAMES = (SPAN, "cp::", "c10d::", "_c10d_functional::", "CompiledFunctionBackward")
_PIDS = 2**23  # more than a process number of Linux; those of ranks lie apart

Clock = tuple[str, int]
"""A rank's host, and its time in nanoseconds when it left a barrier."""


def trace_text(profile: torch.profiler.profile) -> str:
    """Return what was recorded on this rank, as torch.profiler exports it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        return path.read_text()


def own_times(profile: torch.profiler.profile) -> str:
    """Return torch.profiler's table, of names of cpcompile and of collectives alone."""
    averages = profile.key_averages()
    averages[:] = [x for x in averages if x.key.startswith(_NAMES)]
    return str(averages.table(sort_by="cpu_time_total", max_name_column_width=80))


def merged(
    traces: Sequence[str], about: Sequence[str] = (), clocks: Sequence[Clock] = ()
) -> str:
    """Merge the traces of all ranks, for Perfetto (ui.perfetto.dev): a process each.

    about: lines that the trace carries along, such as a table of the calls.
    clocks: of all ranks, after one barrier; other hosts are brought to the first's.
    """
    records = [json.loads(text) for text in traces]
    first, left = records[0]["baseTimeNanoseconds"], dict(reversed(clocks))
    ahead = [(left[host] - clocks[0][1]) / 1e3 for host, _ in clocks]
    events: list[dict[str, Any]] = []
    for rank, (record, early) in enumerate(
        zip(records, ahead or [0.0] * len(records), strict=True)
    ):
        later = (record["baseTimeNanoseconds"] - first) / 1e3 - early
        for x in record["traceEvents"]:
            if not isinstance(x["pid"], int):
                continue  # the profiler's own marks
            x |= {"pid": x["pid"] + rank * _PIDS, "ts": x["ts"] + later}
            if "id" in x:  # of arrows
                x["id"] = f"{rank}.{x['id']}"
            if x["name"] == "process_name":
                x["args"]["name"] = f"rank {rank}: {x['args']['name']}"
            if x["name"] == "process_sort_index":
                x["args"]["sort_index"] += rank * _PIDS
            events.append(x)
    trace = {"traceEvents": events, "otherData": {"about": [*about]}}
    return json.dumps(records[0] | trace)


def read_clock(group: ProcessGroup) -> Clock:
    """Read the clock of this rank; all ranks of the group call it together."""
    for _ in range(3):  # the slowest rank comes late to the first
        dist.barrier(group)
    return socket.gethostname(), time.time_ns()


@dataclass
class StepRecorder:
    """Record the third step of the programs that `config.profile` was set for.

    path: file of the merged trace, which the first rank of the group writes.
    """

    path: str
    group: ProcessGroup
    first: object = None  # the graph with which a step begins
    steps: int = 0
    profile: torch.profiler.profile | None = None

    def begins(self, graph: object) -> None:
        """Begin or end a step; every graph of the program calls this when it runs."""
        self.first = self.first or graph
        if graph is not self.first:
            return
        self.steps += 1
        if self.profile is not None:
            self.write()
        elif self.steps == WARM_UP_STEPS + 1:
            profile = torch.profiler.profile(acc_events=True)
            try:
                profile.start()
            except RuntimeError as error:
                warn_once(f"{_SETTING}: no trace, a profiler runs already: {error}")
                return
            self.profile = profile
            atexit.register(self._too_early)

    def write(self) -> None:
        """End the step, and write what all ranks recorded; all call it together."""
        assert self.profile is not None, "a step was begun"
        profile, self.profile = self.profile, None
        profile.stop()
        records: list[Any] = [None] * self.group.size()
        record = trace_text(profile), read_clock(self.group)
        dist.all_gather_object(records, record, group=self.group)
        if self.group.rank() == 0:
            texts, clocks = zip(*records, strict=True)
            Path(self.path).write_text(merged(texts, clocks=clocks))
            log.info("wrote %s: one step of %d ranks", self.path, len(records))

    def _too_early(self) -> None:
        if self.profile is not None:
            log.warning(
                f"{_SETTING}: the program ends in the step that is recorded, the third "
                "one, so that %s is not written; needed one step more",
                self.path,
            )


_recorders: dict[str, StepRecorder] = {}


def step_recorder(path: str, group: ProcessGroup) -> StepRecorder:
    """Return the recorder that writes `path`; the graphs of a program share it."""
    return _recorders.setdefault(path, StepRecorder(path, group))
