"""`cpcompile plan --fit`: the longest sequences, beside published ones."""

from __future__ import annotations

import argparse
from dataclasses import fields

from cpcompile.apps.cli.presets import Preset
from cpcompile.cost.max_sequence.fit import Fit, fit
from cpcompile.cost.max_sequence.model_memory import Decoder, Memory
from cpcompile.cost.plain_data import to_json
from cpcompile.cost.plans.tables import text_table

_PARTS = tuple(f.name for f in fields(Memory))


# Bekman et al., Arctic Long Sequence Training (arXiv 2506.13996), on H100 of 80 GB:
# parameters and checkpoints are in the memory of the host there, and MLPs in tiles.
SOURCES = {
    "a": "Arctic Long Sequence Training (arXiv 2506.13996), offloading to the host",
    "b": "Ulysses with heads in chunks (arXiv 2602.21196)",
}
PUBLISHED = {  # (model, ranks, bytes of memory): (tokens, letter in SOURCES)
    ("llama3-8b", 1, 80e9): [(500_000, "a")],
    ("llama3-8b", 8, 80e9): [(3_700_000, "a"), (5_000_000, "b")],
    ("llama3-8b", 32, 80e9): [(15_000_000, "a")],
}


def run(arguments: argparse.Namespace, preset: Preset) -> int:
    """Find the longest sequences, and print them.

    Raises: ValueError for missing or wrong sizes.
    """
    if arguments.memory is None:
        raise ValueError("--fit needs --memory, the bytes of one rank, such as 80G")
    model = _decoder(preset)
    names = ("memory", "dtype", "hardware", "fsdp", "checkpoint", "tile", "offload")
    how = {name: getattr(arguments, name) for name in names}
    fits = [fit(model, ranks=ranks, **how) for ranks in arguments.cp]
    if arguments.json:
        print(to_json(fits))
    else:
        print("\n".join(_text(arguments, fits)))
    return 0


def _decoder(preset: Preset) -> Decoder:
    needed = ("hidden", "feed_forward", "vocabulary", "layers")
    missing = [name for name in needed if not getattr(preset, name)]
    if missing:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise ValueError(f"--fit needs {options} of this model")
    names = (*needed, "heads", "kv_heads", "head_dim", "tied", "normed")
    return Decoder(**{name: getattr(preset, name) for name in names})


def _text(arguments: argparse.Namespace, fits: list[Fit]) -> list[str]:
    header = ("ranks", "tokens", "published", "s per step", "strategy", *_PARTS)
    rows = [_row(arguments, x) for x in fits]
    notes = ["GB (1e9) of one rank at that length; one row of tokens per step."]
    told = {source for x in fits for _, source in _published(arguments, x)}
    notes += [f"{letter}: {SOURCES[letter]}." for letter in sorted(told)]
    notes.append(
        "s per step: attention and products by the cost model, without messages of "
        "parameters and copies to the host."
    )
    return [text_table([header, *rows]), *notes]


def _published(arguments: argparse.Namespace, x: Fit) -> list[tuple[int, str]]:
    return PUBLISHED.get((arguments.model, x.ranks, arguments.memory), [])


def _row(arguments: argparse.Namespace, x: Fit) -> tuple[str, ...]:
    published = [f"{tokens:,} {source}" for tokens, source in _published(arguments, x)]
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
