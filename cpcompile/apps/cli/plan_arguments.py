"""The arguments of the commands, and how their words become numbers, without torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any

from cpcompile.cost.max_sequence.fit import OFFLOADABLE
from cpcompile.cost.planner import BYTES_PER_ELEMENT
from cpcompile.cost.plans import Direction
from cpcompile.geometry.layout import Layout

MOST_RANKS = 2**16
_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    f"{letter}i": 2 ** (10 * power) for power, letter in enumerate("kmgt", 1)
}


def add_rows(
    parser: argparse._ActionsContainer, rows: Mapping[str, str | None]
) -> None:
    """Add arguments: their names and kind, and their help.

    A kind in capitals is the name of the value too; a name without one is a flag.
    """
    for words, text in rows.items():
        *names, kind = words.split()
        how = dict(_KINDS.get(kind, {}))
        if kind.startswith("--"):
            names, how = [*names, kind], {"action": "store_true"}
        elif kind.isupper():
            how["metavar"] = kind
        parser.add_argument(*names, help=text, **how)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cpcompile plan` to a parser."""
    for title, rows in _GROUPS.items():
        add_rows(parser.add_argument_group(title), rows)
    parser.set_defaults(**_DEFAULTS)


def _count(text: str) -> int:
    match = re.fullmatch(r"([1-9]\d*)([kKmM]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive integer")
    return int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()]


def bytes_of_text(text: str) -> float:
    """Return the number of bytes that "80G" or "8GiB" means."""
    match = re.fullmatch(r"(\d+\.?\d*)\s*([kmgt]?i?)b?", text.lower())
    size = 0.0 if match is None else float(match[1]) * _BYTES.get(match[2], 0)
    if size <= 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no positive number of bytes, such as 8GiB or 8589934592"
        )
    return size


def _override(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    try:
        return name.strip(), float(value)
    except ValueError:
        what = f"{value!r} is no number" if equals else "there is no ="
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=VALUE: {what}"
        ) from None


def _ranks(text: str) -> tuple[int, ...]:
    """Parse "8", "2,4,8", or "1..1024": a number, and its doubles up to the last."""
    ranks: list[int] = []
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        try:
            low, high = int(first), int(last if dots else first)
        except ValueError:
            low = high = 0
        if not 1 <= low <= high <= MOST_RANKS:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not like 8, 2,4,8 or 1..1024 (1 to {MOST_RANKS} ranks)"
            )
        while low <= high:
            ranks.append(low)
            low *= 2
    return tuple(dict.fromkeys(ranks))


_KINDS: dict[str, dict[str, Any]] = {
    "N": {"type": _count},
    "BYTES": {"type": bytes_of_text},
    "RANKS": {"type": _ranks},
    "NAME=VALUE": {"type": _override, "action": "append"},
    "PARTS": {"type": lambda text: tuple(text.split(","))},
    "int": {"type": int},
    "str": {},
    "switch": {"action": argparse.BooleanOptionalAction},
    "dtype": {"choices": list(BYTES_PER_ELEMENT)},
    "direction": {"choices": [x.value for x in Direction]},
    "layout": {"choices": ["auto", *(x.value for x in Layout)]},
}
_DEFAULTS: dict[str, Any] = {
    "batch": 1,
    "dtype": "bfloat16",
    "direction": "both",
    "hardware": "h100",
    "layout": "auto",
    "override": [],
    "offload": (),
}
_GROUPS: dict[str, dict[str, str | None]] = {
    "model, by name or by sizes": {
        "--model NAME": "such as llama3-8b",
        "--heads N": "query heads",
        "--kv-heads N": "key/value heads; as many as query heads if not given",
        "--head-dim N": "dims of a query and key head",
        "--value-dim N": "dims of a value head, if different",
        "--latent-dim N": "numbers per token that keys and values are made of, if "
        "fewer",
        "--layers N": "attention calls per pass, for the total",
        "--causal switch": "a token sees those before it (the default), or all",
    },
    "call": {
        "--seq N": "tokens; 128k is 131072",
        "--kv-seq N": "keys, if different",
        "--batch N": None,
        "--dtype dtype": None,
        "--direction direction": None,
        "--relayout": "a balanced layout has to be made for this call, and undone",
    },
    "machine": {
        "--cp --gpus RANKS": "that share the sequence: 8, or 2,4,8, or 1..1024 for "
        "powers of two",
        "--hardware NAME": "or the path of a .json file",
        "--ranks-per-node N": "if not as the profile says",
        "--layout layout": None,
        "--memory-budget BYTES": "extra memory per rank that a strategy may take, "
        "such as 8GiB",
        "--override NAME=VALUE": "another number for a field of the profile; may be "
        "repeated",
    },
    "the longest sequence that fits": {
        "--fit": "find it, for a decoder with a gated MLP",
        "--memory BYTES": "of one rank, such as 80G",
        "--fsdp": "parameters are sharded over the ranks",
        "--checkpoint": "layers are computed again",
        "--tile": "MLPs run in tiles, as the loss does in any case",
        "--offload PARTS": "that are in the memory of the host: "
        f"{','.join(OFFLOADABLE)}",
        "--hidden N": "width of the model",
        "--feed-forward N": "width of the MLP",
        "--vocabulary N": "words",
    },
    "output": {
        "--candidates": "every candidate of every number of ranks; printed anyway "
        "for one",
        "--json": "what cp.plan returns",
        "--plot FILE": "draw the plans, too: a .svg, .png or .pdf (needs pip install "
        '"cpcompile[plot]")',
    },
}


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
_MODEL_DEFAULTS: dict[str, dict[str, Any]] = {
    "check": {"ranks": 4},
    "verify": {"world": 4, "steps": 2},
    "trace": {"world": 4, "out": "trace.json"},
}


def add_model_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the arguments of one of these commands to its parser."""
    add_rows(parser, _ROWS[command])
    parser.set_defaults(**_MODEL_DEFAULTS[command])
