"""The arguments of `cpcompile verify`; importing them imports no torch."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add them to a parser."""
    parser.add_argument(
        "function",
        metavar="MODULE:FUNCTION",
        help="returns a model and the inputs of one call: a tensor, a tuple, or a dict "
        "of keyword arguments",
    )
    parser.add_argument("--world", type=int, default=4, help="ranks to start (4)")
    parser.add_argument("--steps", type=int, default=2, help="steps of descent (2)")
    for name in ("inner", "strategy", "layout"):
        parser.add_argument(f"--{name}", help=f"the option {name!r} of the backend")
    parser.add_argument("--json", metavar="PATH", help="write the report there as JSON")
