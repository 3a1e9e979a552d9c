"""`cpcompile check my_module:make_model_and_inputs`, `verify` and `trace`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cpcompile.apps.checking.check import check_call
from cpcompile.apps.checking.fake_step import CheckedCall
from cpcompile.apps.cli.entry_point import made
from cpcompile.apps.verification.verification_report import Report
from cpcompile.apps.verification.verify import trace, verify


def _verify(parsed: argparse.Namespace) -> int:
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


def _trace(parsed: argparse.Namespace) -> int:
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
    values = {name: getattr(parsed, name, None) for name in _OPTIONS}
    return {name: value for name, value in values.items() if value is not None}


def _check(parsed: argparse.Namespace) -> int:
    """Check, print the report or its JSON; return the exit code."""
    model, args, kwargs = made(parsed.function)
    call = CheckedCall(
        model,
        args,
        kwargs,
        options=_options(parsed),
        ranks=parsed.ranks,
        backward=not parsed.forward,
        hardware=parsed.hardware,
        memory=parsed.memory,
    )
    report = check_call(call, entry=parsed.function)
    print(report.to_json() if parsed.json else report)
    print(f"checked in {report.seconds:.1f} s", file=sys.stderr)
    return report.exit_code


_OPTIONS = ("inner", "strategy", "layout")
COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "check": _check,
    "verify": _verify,
    "trace": _trace,
}
