"""The arguments of `cpcompile check`, `verify` and `trace`, without importing torch."""

from __future__ import annotations

import argparse

from cpcompile.apps.cli.plan_arguments import bytes_of_text


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
        "--plot", metavar="FILE", help="draw the plans of the calls there, as .svg"
    )


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `check` to a parser."""
    _add_function(parser)
    parser.add_argument(
        "--ranks", "--world", type=int, default=4, help="that would share it (4)"
    )
    parser.add_argument(
        "--forward", action="store_true", help="the forward alone, without gradients"
    )
    _add_options(parser, "strategy", "layout")
    parser.add_argument(
        "--memory",
        type=bytes_of_text,
        metavar="BYTES",
        help="of one rank, such as 80G: how long a sequence fits",
    )
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help="whose profile chooses strategies, such as h100; else this machine's",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_shared(parser: argparse.ArgumentParser) -> None:
    _add_function(parser)
    parser.add_argument("--world", type=int, default=4, help="ranks to start (4)")
    _add_options(parser, "inner", "strategy", "layout")


def _add_options(parser: argparse.ArgumentParser, *names: str) -> None:
    for name in names:
        parser.add_argument(f"--{name}", help=f"the option {name!r} of the backend")


def _add_function(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "function",
        metavar="MODULE:FUNCTION",
        help="returns a model and the inputs of one call: a tensor, a tuple, or a dict "
        "of keyword arguments",
    )
