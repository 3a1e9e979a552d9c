"""The cases of section a: masks, sizes, dtypes, and what changes scores and weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from cpcompile.geometry.visibility import ALL, NOTHING, Visible
from tools.gpu.sections import Mode

DOCUMENT = 100  # tokens
DTYPES = ("bfloat16", "float16")
BIASES = ("key", "distance")
SMOKE_MASKS = ("causal", "fold", "row slice", "document vectors")
SMOKE_SIZES = {"rows": 56, "keys": 40, "dim": 24, "heads": 2, "kv_heads": 1}

Vector = Callable[[Tensor], Tensor]  # limits of rows


@dataclass(frozen=True)
class Mask:
    """What rows see of a chunk, for given sizes."""

    visible: Callable[[int, int], Visible] = lambda rows, keys: ALL
    upper: Vector | None = None
    lower: Vector | None = None


def _line(upper: int) -> Visible:
    return Visible(upper=(upper, upper))


MASKS = {
    "all": Mask(),
    "none": Mask(lambda rows, keys: NOTHING),
    "out of reach": Mask(lambda rows, keys: _line(-rows)),
    "causal": Mask(lambda rows, keys: _line(1)),
    "offset": Mask(lambda rows, keys: _line(keys // 3)),
    "negative offset": Mask(lambda rows, keys: _line(-rows // 4)),
    "parity": Mask(lambda rows, keys: Visible(upper=(1, 0))),
    "fold": Mask(lambda rows, keys: Visible(upper=(keys // 4, -7))),
    "row slice": Mask(lambda rows, keys: Visible(rows=(rows // 2, rows))),
    "inner rows": Mask(
        lambda rows, keys: Visible(rows=(rows // 3, rows - 5), upper=(9, 9))
    ),
    "key slice": Mask(lambda rows, keys: Visible(keys=(0, keys // 2))),
    "inner keys": Mask(
        lambda rows, keys: Visible(keys=(keys // 5, keys - 3), upper=(9, 9))
    ),
    "window": Mask(lambda rows, keys: _line(1), lower=lambda row: row - 100),
    "upper vector": Mask(upper=lambda row: row // 7 * 5),
    "lower vector": Mask(lower=lambda row: row // DOCUMENT * DOCUMENT),
    "document vectors": Mask(
        upper=lambda row: row + 1, lower=lambda row: row // DOCUMENT * DOCUMENT
    ),
}


@dataclass(frozen=True)
class StepCase:
    """One step: sizes, dtype, layout in memory, mask, and what went before."""

    mask: str = "causal"
    dtype: str = "bfloat16"
    rows: int = 512
    keys: int = 640
    dim: int = 128
    value_dim: int | None = None  # None: dim
    heads: int = 4
    kv_heads: int = 2
    batch: int = 1
    order: str = "BHSD"  # of dims in memory; "wide" is rows 2^22 elements apart
    accumulate: bool = True
    final: bool = False
    softcap: float = 0.0
    dropout_p: float = 0.0
    bias: str = ""  # of positions: "key" or "distance"
    score_mod: bool = False  # that of tools/bench/aot_score_mod.py

    def __str__(self) -> str:
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default and f.name not in ("mask", "dtype")
        ]
        return " ".join((self.mask, self.dtype, *changed))


def cases(mode: Mode) -> list[StepCase]:
    """List all cases, those that compile longest first: they decide the end."""
    if mode.smoke:
        sizes = [StepCase(mask, **SMOKE_SIZES) for mask in SMOKE_MASKS]
        return [
            *sizes,
            dataclasses.replace(sizes[0], dtype="float16", order="BSHD", final=True),
            StepCase("none", **SMOKE_SIZES, accumulate=False),
            dataclasses.replace(sizes[0], softcap=1.0),
            dataclasses.replace(sizes[-1], dropout_p=0.25),
            *(dataclasses.replace(sizes[-1], bias=bias) for bias in BIASES),
            dataclasses.replace(sizes[-1], score_mod=True),
        ]
    if mode.quick:
        changed = StepCase("document vectors", softcap=1.0, dropout_p=0.25)
        return [
            *(StepCase(mask) for mask in ("causal", "row slice", "key slice")),
            changed,
            StepCase("document vectors", bias="distance"),
            StepCase("document vectors", score_mod=True),
        ]
    return list(dict.fromkeys(_all_cases()))


def _all_cases() -> Iterator[StepCase]:
    for dim in (256, 128, 96, 80, 64):
        yield StepCase("causal", "float32", dim=dim, rows=300, keys=260)
    for mask in ("window", "parity", "document vectors"):
        yield StepCase(mask, "float32", dim=64)
    for dim in (64, 128):
        yield StepCase("causal", "tf32", dim=dim)
    for dim in (256, 96, 80, 64):
        for dtype in DTYPES:
            yield StepCase("causal", dtype, dim=dim, final=True)
    for mask in MASKS:
        yield StepCase(mask, "bfloat16")
        # float16 is eight times finer, so that it shows more of a wrong mask.
        yield StepCase(mask, "float16", rows=500, keys=389, order="BSHD")
    for mask in ("all", "causal", "none"):
        yield StepCase(mask, accumulate=False)
        yield StepCase(mask, accumulate=False, final=True)
    for changes in (
        {"softcap": 1.0},
        {"softcap": 30.0},
        {"dropout_p": 0.1},
        {"softcap": 1.0, "dropout_p": 0.5},
    ):
        for mask in ("all", "document vectors"):
            for dim in (64, 128, 256):
                yield StepCase(mask, dim=dim, **changes)
            yield StepCase(mask, "float16", rows=500, keys=389, batch=2, **changes)
        yield StepCase("key slice", "float16", **changes)
        yield StepCase("row slice", "float32", dim=64, **changes)
    for dim in (64, 128, 256):
        yield StepCase("document vectors", dim=dim, score_mod=True)
    yield StepCase("document vectors", score_mod=True, dropout_p=0.1)
    for bias in BIASES:
        for dim in (64, 128, 256):
            yield StepCase("document vectors", dim=dim, bias=bias)
            yield StepCase("all", "float32", dim=dim, rows=300, keys=260, bias=bias)
        yield StepCase("window", "float16", rows=500, keys=389, batch=2, bias=bias)
        yield StepCase("row slice", "float16", bias=bias)
        yield StepCase("none", bias=bias, accumulate=False)
        yield StepCase("causal", bias=bias, softcap=1.0, dropout_p=0.5)
    for heads, kv_heads in ((8, 2), (6, 1), (3, 3)):
        yield StepCase("causal", heads=heads, kv_heads=kv_heads, batch=2, order="BSHD")
    for rows, keys in ((1, 1), (129, 65), (1000, 777), (777, 1000)):
        yield StepCase("causal", "float16", rows=rows, keys=keys, final=True)
    yield StepCase("causal", dim=64, value_dim=128, heads=2)
    yield StepCase("causal", dim=192, value_dim=128, heads=2)
    for mask in ("all", "causal"):
        yield StepCase(mask, rows=4096, keys=4096, heads=2)
    yield StepCase("causal", rows=520, heads=1, kv_heads=1, order="wide")
