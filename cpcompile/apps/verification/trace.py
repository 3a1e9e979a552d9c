"""Record one step of a model on local processes, for `cpcompile trace`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn as nn

from cpcompile.apps.verification import on_rank
from cpcompile.apps.verification.progress_bar import progress
from cpcompile.apps.verification.rank_results import local_processes
from cpcompile.apps.verification.steps import ComparedProgram
from cpcompile.errors import InputError
from cpcompile.options import parse_options
from cpcompile.reporting.explanation import Explanation
from cpcompile.reporting.tracing.chrome import chrome_trace
from cpcompile.reporting.tracing.events import Event
from cpcompile.reporting.tracing.measured import measured


@dataclass(frozen=True)
class Trace:
    """One step: the events of every rank, and the calls with what they took.

    note: why no times stand beside the calls; "" if they do.
    """

    ranks: tuple[tuple[Event, ...], ...]
    explanation: Explanation
    note: str

    def to_json(self) -> str:
        """Write the step for Perfetto; the table of the calls lies in its metadata."""
        return chrome_trace(self.ranks, str(self.explanation).splitlines())


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    world: int,
    show_progress: bool = False,
) -> Trace:
    """Run a step, forward and backward, on `world` local processes, and record it.

    Raises: as cp.verify, for the same reasons.
    """
    parse_options(options)
    if type(world) is not int or world < 2:
        raise InputError(f"got world={world!r}; needed at least 2 ranks")
    program = ComparedProgram(model, args, kwargs, 1)
    with progress(2, show_progress) as tick:
        tick(f"start of {world} ranks")
        with local_processes(program, world) as ranks:
            tick("compile, warm up, record")
            records = ranks.call(on_rank.trace, options)
    events = tuple(tuple(of_rank) for of_rank, _ in records)
    reports = records[0][1]
    calls = sum(call.plan is not None for report in reports for call in report.calls)
    times = measured(events, calls)
    note = ""
    if times is None:
        note = (
            "no times stand beside the calls, because ranks ran attention another "
            f"number of times than there are calls ({calls}), as under checkpointing"
        )
    return Trace(events, Explanation(reports, tuple(times or ())), note)
