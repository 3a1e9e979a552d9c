"""The arguments of `cpcompile plan`, and how their words become numbers."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from cpcompile.cost.max_sequence.fit import OFFLOADABLE
from cpcompile.cost.planner import BYTES_PER_ELEMENT
from cpcompile.cost.plans import Direction
from cpcompile.geometry.layout import Layout

MOST_RANKS = 2**16
_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    f"{letter}i": 2 ** (10 * power) for power, letter in enumerate("kmgt", 1)
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cpcompile plan` to a parser."""
    model = parser.add_argument_group("model, by name or by sizes")
    model.add_argument("--model", metavar="NAME", help="such as llama3-8b")
    for name, what in (
        ("heads", "query heads"),
        ("kv-heads", "key/value heads; as many as query heads if not given"),
        ("head-dim", "dims of a query and key head"),
        ("value-dim", "dims of a value head, if different"),
        ("latent-dim", "numbers per token that keys and values are made of, if fewer"),
        ("layers", "attention calls per pass, for the total"),
    ):
        model.add_argument(f"--{name}", type=_count, metavar="N", help=what)
    model.add_argument(
        "--causal",
        action=argparse.BooleanOptionalAction,
        help="a token sees those before it (the default), or all",
    )
    call = parser.add_argument_group("call")
    call.add_argument("--seq", type=_count, metavar="N", help="tokens; 128k is 131072")
    call.add_argument("--kv-seq", type=_count, metavar="N", help="keys, if different")
    call.add_argument("--batch", type=_count, default=1, metavar="N")
    call.add_argument("--dtype", choices=list(BYTES_PER_ELEMENT), default="bfloat16")
    call.add_argument(
        "--direction", choices=[d.value for d in Direction], default="both"
    )
    call.add_argument(
        "--relayout",
        action="store_true",
        help="a balanced layout has to be made for this call, and undone",
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--cp",
        "--gpus",
        type=_ranks,
        metavar="RANKS",
        help="that share the sequence: 8, or 2,4,8, or 1..1024 for powers of two",
    )
    machine.add_argument(
        "--hardware", default="h100", metavar="NAME", help="or the path of a .json file"
    )
    machine.add_argument(
        "--ranks-per-node", type=_count, metavar="N", help="if not as the profile says"
    )
    machine.add_argument(
        "--layout", choices=["auto", *(x.value for x in Layout)], default="auto"
    )
    machine.add_argument(
        "--memory-budget",
        type=bytes_of_text,
        metavar="BYTES",
        help="extra memory per rank that a strategy may take, such as 8GiB",
    )
    machine.add_argument(
        "--override",
        type=_override,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another number for a field of the profile; may be repeated",
    )
    fitting = parser.add_argument_group("the longest sequence that fits")
    fitting.add_argument(
        "--fit", action="store_true", help="find it, for a decoder with a gated MLP"
    )
    fitting.add_argument(
        "--memory", type=bytes_of_text, metavar="BYTES", help="of one rank, such as 80G"
    )
    fitting.add_argument(
        "--fsdp", action="store_true", help="parameters are sharded over the ranks"
    )
    fitting.add_argument(
        "--checkpoint", action="store_true", help="layers are computed again"
    )
    fitting.add_argument(
        "--tile",
        action="store_true",
        help="MLPs run in tiles, as the loss does in any case",
    )
    fitting.add_argument(
        "--offload",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="PARTS",
        help=f"that are in the memory of the host: {','.join(OFFLOADABLE)}",
    )
    for name, what in (
        ("hidden", "width of the model"),
        ("feed-forward", "width of the MLP"),
        ("vocabulary", "words"),
    ):
        fitting.add_argument(f"--{name}", type=_count, metavar="N", help=what)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--candidates",
        action="store_true",
        help="every candidate of every number of ranks; printed anyway for one",
    )
    output.add_argument("--json", action="store_true", help="what cp.plan returns")
    output.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the plans, too: a .svg, .png or .pdf (needs pip install "
        '"cpcompile[plot]")',
    )


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
