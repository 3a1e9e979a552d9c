"""The arguments of `cpcompile verify` and `trace`; importing them imports no torch."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `verify` to a parser."""
    _add_shared(parser)
    parser.add_argument("--steps", type=int, default=2, help="steps of descent (2)")
    parser.add_argument("--json", metavar="PATH", help="write the report there as JSON")


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trace` to a parser."""
    _add_shared(parser)
    parser.add_argument(
        "--out", default="trace.json", help="where the trace goes (trace.json)"
    )
    parser.add_argument(
        "--html", metavar="FILE", help="write a page of the calls there"
    )


def _add_shared(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "function",
        metavar="MODULE:FUNCTION",
        help="returns a model and the inputs of one call: a tensor, a tuple, or a dict "
        "of keyword arguments",
    )
    parser.add_argument("--world", type=int, default=4, help="ranks to start (4)")
    for name in ("inner", "strategy", "layout"):
        parser.add_argument(f"--{name}", help=f"the option {name!r} of the backend")
