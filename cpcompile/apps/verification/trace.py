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
from cpcompile.reporting.tracing import merged


@dataclass(frozen=True)
class Trace:
    """One step: what torch.profiler exports on every rank, and the calls.

    times: its table of the operators and spans of the first rank.
    """

    ranks: tuple[str, ...]
    explanation: Explanation
    times: str

    def to_json(self) -> str:
        """Write the step for Perfetto; the table of the calls lies in its metadata."""
        return merged(self.ranks, str(self.explanation).splitlines())


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
    texts, (times, *_), (reports, *_) = zip(*records, strict=True)
    return Trace(texts, Explanation(reports), times)
