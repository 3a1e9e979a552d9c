"""Record one step of a model on local processes, for `cpcompile trace`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn as nn

from cpcompile.apps.verification import on_rank
from cpcompile.apps.verification.ranks import Ranks, told
from cpcompile.apps.verification.steps import ComparedProgram
from cpcompile.options import parse_options
from cpcompile.reporting.explanation import Explanation
from cpcompile.reporting.step_trace import merged


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
    ranks = Ranks(world, options)
    told(show_progress)(f"compile, warm up, record on {world} ranks")
    program = ComparedProgram(model, args, kwargs, 0)
    records = ranks.run(on_rank.trace, program, options)
    texts, (times, *_), (reports, *_) = zip(*records, strict=True)
    return Trace(texts, Explanation(reports), times)
