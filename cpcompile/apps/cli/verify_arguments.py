"""The arguments of `cpcompile check`, `verify` and `trace`, without importing torch."""

from __future__ import annotations

import argparse
from typing import Any

from cpcompile.apps.cli.plan_arguments import add_rows

_FUNCTION = {
    "function MODULE:FUNCTION": "returns a model and the inputs of one call: a tensor, "
    "a tuple, or a dict of keyword arguments"
}
_STRATEGY, _LAYOUT, _INNER = (
    {f"--{name} str": f"the option {name!r} of the backend"}
    for name in ("strategy", "layout", "inner")
)
_WORLD = {"--world int": "ranks to start (4)"}
_SHARED = _FUNCTION | _WORLD | _INNER | _STRATEGY | _LAYOUT
_ROWS = {
    "check": _FUNCTION
    | {
        "--ranks --world int": "that would share it (4)",
        "--forward": "the forward alone, without gradients",
    }
    | _STRATEGY
    | _LAYOUT
    | {
        "--memory BYTES": "of one rank, such as 80G: how long a sequence fits",
        "--hardware NAME": "whose profile chooses strategies, such as h100; else this "
        "machine's",
        "--json": "print JSON",
    },
    "verify": _SHARED
    | {
        "--steps int": "steps of descent (2)",
        "--json PATH": "write the report there as JSON",
    },
    "trace": _SHARED
    | {
        "--out str": "where the trace goes (trace.json)",
        "--plot FILE": "draw the plans of the calls there, as .svg",
    },
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "check": {"ranks": 4},
    "verify": {"world": 4, "steps": 2},
    "trace": {"world": 4, "out": "trace.json"},
}


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the arguments of one of these commands to its parser."""
    add_rows(parser, _ROWS[command])
    parser.set_defaults(**_DEFAULTS[command])
