"""What one rank does: run the compiled model, and compare, or record a step."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cpcompile import config
from cpcompile.apps.verification.compare import Errors, errors_of
from cpcompile.apps.verification.steps import (
    RECOMPILE_LIMIT,
    ComparedProgram,
    results_of,
)
from cpcompile.reporting.graph_report import GraphReport, recording
from cpcompile.reporting.step_trace import WARM_UP_STEPS, own_times, trace_text


@dataclass(frozen=True)
class Ran:
    """How the program was compiled, and what it computed.

    errors: of its tensors. graphs: a summary of each in words. calls: number of
        attention calls. dropout: the modules whose calls have dropout.
    """

    errors: Errors
    graphs: tuple[str, ...]
    calls: int
    dropout: tuple[str, ...]


def compute(
    program: ComparedProgram,
    mesh: DeviceMesh,
    options: Mapping[str, Any],
    exact: Mapping[str, Tensor],
    rate: float,
) -> Ran:
    """Compile the program, run its steps, and compare with the exact tensors."""
    # Imported late: a rank that imports it says that it is there. As a function of its
    # own it is compiled anew, though Dynamo may know the program.
    from cpcompile.backend import cp

    backend = functools.partial(cp, options=dict(options) | {"mesh": mesh})
    call = torch.compile(program.model, backend=backend)
    with recording() as reports, _many_programs():
        values = results_of(program, call, rate)
    once: dict[int, GraphReport] = {id(report): report for report in reports}
    return Ran(
        errors=errors_of(values, exact),
        graphs=tuple(report.summary() for report in once.values()),
        calls=sum(len(r.calls) + len(r.by_hand) for r in once.values()),
        dropout=tuple(c.path for r in once.values() for c in r.calls if c.dropout_p),
    )


def trace(
    program: ComparedProgram, mesh: DeviceMesh, options: Mapping[str, Any]
) -> tuple[str, str, tuple[GraphReport, ...]]:
    """Record one warm step; return its trace, a table of its times, and its graphs."""
    options = dict(options) | {"mesh": mesh}
    call = torch.compile(program.model, backend="cp", options=options)
    profile = torch.profiler.profile(acc_events=True)
    with recording() as reports:
        for step in range(WARM_UP_STEPS + 1):
            reports.clear()
            if step == WARM_UP_STEPS:
                dist.barrier()
                profile.start()
            results_of(program, call, 0.0)
    profile.stop()
    return trace_text(profile), own_times(profile), tuple(reports)


@contextmanager
def _many_programs() -> Iterator[None]:
    """Compile every program that is asked for, and watch none of them."""
    with (
        torch._dynamo.config.patch(
            recompile_limit=RECOMPILE_LIMIT,
            # In checkpoint regions, too, hooks keep what modules return.
            skip_fwd_side_effects_in_bwd_under_checkpoint=True,
        ),
        # Ranks that drift apart are to be reported, with the place, and not to end it.
        config.patch(check_ranks=0, profile=None),
    ):
        yield
