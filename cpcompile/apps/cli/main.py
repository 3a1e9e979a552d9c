"""The command `cpcompile`: check a model, verify it, plan without a GPU.

Exit codes: 0, 1 if `doctor` found problems, `check` a call that is refused or `verify`
a difference, 2 for a mistake of the user, which is one line on stderr.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from cpcompile.apps.cli import cli_plan, plan_arguments

_CALIBRATE = "measure this machine, and keep the rates as its profile"
_COMMANDS = {  # help, description
    "check": (
        "say what several ranks would do with a model, in seconds",
        "Compile a model as one of several ranks, in this process and without a "
        "launch: what is shared out, what is gathered, what breaks the graph, and the "
        "one thing to do next.",
    ),
    "plan": (
        "compare every way to run a model's attention on so many ranks",
        "Compare every way to run a model's attention on so many ranks; needs no GPU "
        "and no process group.",
    ),
    "doctor": (
        "versions, devices, backends, private interfaces of torch, and fixes",
        "Say what cpcompile finds here, and what to do about problems.",
    ),
    "verify": (
        "compare a model on several ranks with the same model on one process",
        "Run a model on local processes and on one process, and compare results, "
        "losses, gradients and weights.",
    ),
    "trace": (
        "record one step of a model on several ranks, for Perfetto",
        "Run a model on local processes, and record one step: a trace of all ranks, "
        "and the times of operators and messages.",
    ),
}


class _Parser(argparse.ArgumentParser):
    """A parser that prints one line per mistake, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if argv[:1] == ["calibrate"]:  # parses its own arguments
            return _calibrate(argv[1:])
        parsed = _parser().parse_args(argv)
    except SystemExit as leaving:  # argparse has printed the help, or the mistake
        return leaving.code if isinstance(leaving.code, int) else 2
    try:
        if parsed.command == "doctor":
            # It imports torch, which takes longer than a plan.
            from cpcompile.apps.cli import doctor

            return doctor.run(as_json=parsed.json)
        if parsed.command != "plan":
            # They import torch as well.
            from cpcompile.apps.cli import cli_model

            return cli_model.COMMANDS[parsed.command](parsed)
        code = cli_plan.run(parsed)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, say `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"cpcompile {parsed.command}: {_one_line(error)}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="cpcompile", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (text, description) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=description)
        if name == "plan":
            plan_arguments.add_arguments(command)
        elif name == "doctor":
            plan_arguments.add_rows(command, {"--json": "print JSON"})
        else:
            plan_arguments.add_model_arguments(command, name)
    commands.add_parser("calibrate", help=_CALIBRATE, add_help=False)
    return parser


def _calibrate(arguments: list[str]) -> int:
    # Measures with torch, which is slow to import.
    from cpcompile.apps import calibration

    return calibration.main(arguments)


def _one_line(error: Exception) -> str:
    return " ".join(re.sub(r"^cp\.plan: ", "", str(error)).split())


if __name__ == "__main__":
    sys.exit(main())
