"""`cpcompile plan --fit`: the longest sequences, beside published ones."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import Any

from cpcompile.apps.cli.presets import Preset
from cpcompile.cost.max_sequence.fit import Fit, fit
from cpcompile.cost.max_sequence.model_memory import Decoder, Memory
from cpcompile.cost.plain_data import to_json
from cpcompile.cost.plans.tables import text_table

_PARTS = tuple(f.name for f in fields(Memory))


@dataclass(frozen=True)
class Published:
    """A published run of others, and the length of its sequence.

    source: the letter of its entry in SOURCES.
    """

    model: str
    ranks: int
    memory: float
    tokens: int
    source: str


# Bekman et al., Arctic Long Sequence Training (arXiv 2506.13996), on H100 of 80 GB:
# parameters and checkpoints are in the memory of the host there, and MLPs in tiles.
SOURCES = {
    "a": "Arctic Long Sequence Training (arXiv 2506.13996), offloading to the host",
    "b": "Ulysses with heads in chunks (arXiv 2602.21196)",
}
PUBLISHED = (
    Published("llama3-8b", 1, 80e9, 500_000, "a"),
    Published("llama3-8b", 8, 80e9, 3_700_000, "a"),
    Published("llama3-8b", 8, 80e9, 5_000_000, "b"),
    Published("llama3-8b", 32, 80e9, 15_000_000, "a"),
)


def run(arguments: argparse.Namespace, preset: Preset) -> int:
    """Find the longest sequences, and print them.

    Raises: ValueError for missing or wrong sizes.
    """
    if arguments.memory is None:
        raise ValueError("--fit needs --memory, the bytes of one rank, such as 80G")
    model = _decoder(arguments, preset)
    fits = [
        fit(
            model,
            memory=arguments.memory,
            ranks=ranks,
            dtype=arguments.dtype,
            hardware=arguments.hardware,
            fsdp=arguments.fsdp,
            checkpoint=arguments.checkpoint,
            tile=arguments.tile,
            offload=arguments.offload,
        )
        for ranks in arguments.cp
    ]
    if arguments.json:
        print(to_json(fits))
    else:
        print("\n".join(_text(arguments, fits)))
    return 0


def _decoder(arguments: argparse.Namespace, preset: Preset) -> Decoder:
    names = ("hidden", "feed_forward", "vocabulary")
    asked = {name: getattr(arguments, name) for name in names}
    dense = preset.dense
    sizes: dict[str, Any] = {
        name: value or (dense and getattr(dense, name)) for name, value in asked.items()
    }
    missing = [f"--{n.replace('_', '-')}" for n, value in sizes.items() if not value]
    if missing or not preset.layers:
        missing += ["--layers"] * (not preset.layers)
        raise ValueError(f"--fit needs {', '.join(missing)} of this model")
    return Decoder(
        layers=preset.layers,
        heads=preset.heads,
        kv_heads=preset.kv_heads,
        head_dim=preset.head_dim,
        tied=dense is not None and dense.tied,
        normed=dense is not None and dense.normed,
        **sizes,
    )


def _text(arguments: argparse.Namespace, fits: list[Fit]) -> list[str]:
    header = ("ranks", "tokens", "published", "s per step", "strategy", *_PARTS)
    rows = [_row(arguments, x) for x in fits]
    notes = ["GB (1e9) of one rank at that length; one row of tokens per step."]
    told = {x.source for each in fits for x in _published(arguments, each)}
    notes += [f"{letter}: {SOURCES[letter]}." for letter in sorted(told)]
    notes.append(
        "s per step: attention and products by the cost model, without messages of "
        "parameters and copies to the host."
    )
    return [text_table([header, *rows]), *notes]


def _published(arguments: argparse.Namespace, x: Fit) -> list[Published]:
    return [
        record
        for record in PUBLISHED
        if (record.model, record.ranks) == (arguments.model, x.ranks)
        and record.memory == arguments.memory
    ]


def _row(arguments: argparse.Namespace, x: Fit) -> tuple[str, ...]:
    published = [f"{y.tokens:,} {y.source}" for y in _published(arguments, x)]
    parts = [f"{getattr(x.memory, name) / 1e9:.1f}" for name in _PARTS]
    tokens = f"{x.tokens:,}" if x.tokens else "none"
    return (
        str(x.ranks),
        tokens,
        ", ".join(published),
        f"{x.seconds:.1f}",
        x.plan.chosen.label,
        *parts,
    )
