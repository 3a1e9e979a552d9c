"""`cpcompile check my_module:make_model_and_inputs`: what a newcomer runs first."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from cpcompile.apps.checking.check import check_call
from cpcompile.apps.checking.fake_step import CheckedCall
from cpcompile.apps.cli.entry_point import made


def run(parsed: argparse.Namespace) -> int:
    """Check, print the report or its JSON; return the exit code."""
    model, args, kwargs = made(parsed.function)
    options: dict[str, Any] = {x: getattr(parsed, x) for x in ("strategy", "layout")}
    call = CheckedCall(
        model,
        args,
        kwargs,
        options={name: x for name, x in options.items() if x is not None},
        ranks=parsed.ranks,
        backward=not parsed.forward,
        hardware=parsed.hardware,
        memory=parsed.memory,
    )
    report = check_call(call, entry=parsed.function)
    print(report.to_json() if parsed.json else report)
    print(f"checked in {report.seconds:.1f} s", file=sys.stderr)
    return report.exit_code
