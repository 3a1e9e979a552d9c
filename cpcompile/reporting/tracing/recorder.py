"""Record one step of a program on this rank, and merge what all ranks recorded.

A step begins with a call of the program's first graph and ends with the next one, so
that the backward is in it. The first steps compile and warm up, and are not recorded.
"""

from __future__ import annotations

import atexit
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup

from cpcompile.logs import warn_once
from cpcompile.reporting.tracing.chrome import chrome_trace
from cpcompile.reporting.tracing.clock_offsets import Clock, ahead
from cpcompile.reporting.tracing.events import Event, events_of

log = logging.getLogger(__name__)

WARM_UP_STEPS = 2


class Recorder:
    """torch.profiler, reduced to the events that `events_of` knows."""

    def __init__(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities, acc_events=True)

    def start(self) -> None:
        """Begin to record. Raises: RuntimeError if a profiler runs already."""
        self._profile.start()

    def stop(self) -> list[Event]:
        """End, and return what happened since the start on this rank."""
        self._profile.stop()
        results: Any = self._profile.profiler.kineto_results  # type: ignore[union-attr]
        records = ((x.name(), x.start_ns(), x.duration_ns()) for x in results.events())
        return events_of(records)


@dataclass
class StepRecorder:
    """Record the third step of the programs that `config.profile` was set for.

    path: file of the merged trace, which the first rank of the group writes.
    """

    path: str
    group: ProcessGroup
    first: object = None  # the graph with which a step begins
    steps: int = 0
    recorder: Recorder | None = field(default=None)

    def begins(self, graph: object) -> None:
        """Begin or end a step; every graph of the program calls this when it runs."""
        self.first = self.first or graph
        if graph is not self.first:
            return
        self.steps += 1
        if self.recorder is not None:
            self.write()
        elif self.steps == WARM_UP_STEPS + 1:
            self._start()

    def _start(self) -> None:
        recorder = Recorder()
        try:
            recorder.start()
        except RuntimeError as error:
            warn_once(
                f"cpcompile.config.profile: no trace, a profiler runs already: {error}"
            )
            return
        self.recorder = recorder
        atexit.register(self._too_early)

    def write(self) -> None:
        """End the step, and write what all ranks recorded; all call it together."""
        assert self.recorder is not None, "a step was begun"
        events, self.recorder = self.recorder.stop(), None
        records: list[Any] = [None] * self.group.size()
        record = events, Clock.read(self.group)
        dist.all_gather_object(records, record, group=self.group)
        if self.group.rank() == 0:
            of_ranks, clocks = zip(*records, strict=True)
            Path(self.path).write_text(chrome_trace(of_ranks, ahead=ahead(clocks)))
            log.info("wrote %s: one step of %d ranks", self.path, len(records))

    def _too_early(self) -> None:
        if self.recorder is not None:
            log.warning(
                "cpcompile.config.profile: the program ends in the step that is "
                "recorded, the third one, so that %s is not written; needed one step "
                "more",
                self.path,
            )


_recorders: dict[str, StepRecorder] = {}


def step_recorder(path: str, group: ProcessGroup) -> StepRecorder:
    """Return the recorder that writes `path`; the graphs of a program share it."""
    if path not in _recorders:
        _recorders[path] = StepRecorder(path, group)
    return _recorders[path]
