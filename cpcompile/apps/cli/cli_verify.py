"""`cpcompile verify my_module:make_model_and_inputs`, and `cpcompile trace`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from cpcompile.apps.cli.entry_point import made
from cpcompile.apps.verification.trace import trace
from cpcompile.apps.verification.verification_report import Report
from cpcompile.apps.verification.verify import verify


def run(parsed: argparse.Namespace) -> int:
    """Verify, print the report, write it as JSON; return the exit code."""
    model, args, kwargs = made(parsed.function)
    report: Report = verify(
        model,
        *args,
        options=_options(parsed),
        world=parsed.world,
        steps=parsed.steps,
        show_progress=True,
        **kwargs,
    )
    print(report)
    if parsed.json:
        Path(parsed.json).write_text(report.to_json() + "\n")
    return report.exit_code


def run_trace(parsed: argparse.Namespace) -> int:
    """Record a step, write it, print the calls with their times; return 0."""
    model, args, kwargs = made(parsed.function)
    recorded = trace(
        model, args, kwargs, _options(parsed), parsed.world, show_progress=True
    )
    Path(parsed.out).write_text(recorded.to_json() + "\n")
    print(recorded.explanation)
    print(f"\nmeasured on rank 0:\n{recorded.times}")
    print(f"wrote {parsed.out}; open it at ui.perfetto.dev", file=sys.stderr)
    if parsed.plot:
        recorded.explanation.draw(parsed.plot)
        print(f"wrote {parsed.plot}", file=sys.stderr)
    return 0


def _options(parsed: argparse.Namespace) -> dict[str, Any]:
    options = {name: getattr(parsed, name) for name in ("inner", "strategy", "layout")}
    return {name: value for name, value in options.items() if value is not None}
