"""Compares predictions with measured runs of other systems: agreement and regret.

A `Shape` is one call that was measured in several forms. The model chooses among them
with the rule of `choose`; the regret of a shape is the measured time of the chosen form
over that of the fastest one, minus 1. Tables are in tests/data, with their sources.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from cpcompile.cost.choose import predict, rank
from cpcompile.cost.hardware.profile import load_profile
from cpcompile.cost.plans import Candidate, Direction, Strategy, Workload
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout

DATA = Path(__file__).parent.parent / "data"
# The measured rings sum their steps by eager PyTorch operators. These two constants
# are the only ones that are fitted, to ring-flash-attention's README (facts 4.5).
EAGER_SUMS = {
    "merge_bytes_per_element": 44.0,
    "backward_merge_bytes_per_element": 73.0,
}
# Measured times that differ by less are not said to be ordered.
NOISE = 0.05


@dataclass(frozen=True)
class Shape:
    """Seconds of one call, predicted and measured, by form."""

    name: str
    predicted: Mapping[str, Candidate]
    measured: Mapping[str, float]
    memory_bytes: float = float("inf")

    @property
    def chosen(self) -> str:
        """What the model takes: ties are decided as `choose` does."""
        forms = tuple(self.predicted.values())
        best = rank(forms, memory_budget=self.memory_bytes)[0]
        return next(form for form, each in self.predicted.items() if each is best)

    @property
    def best(self) -> str:
        return min(self.measured, key=lambda form: self.measured[form])

    @property
    def regret(self) -> float:
        return self.measured[self.chosen] / self.measured[self.best] - 1

    @property
    def ordered_pairs(self) -> list[bool]:
        """Of every two forms that measure differently: predicted in the same order."""
        found = []
        for one, other in combinations(self.measured, 2):
            slow, fast = self.measured[one], self.measured[other]
            if slow < fast:
                one, other, slow, fast = other, one, fast, slow
            if slow / fast - 1 > NOISE:
                found.append(self.seconds(one) > self.seconds(other))
        return found

    def seconds(self, form: str) -> float:
        seconds = self.predicted[form].seconds
        assert seconds is not None, f"{form} of {self.name} is out"
        return seconds


@dataclass(frozen=True)
class Score:
    """How well one table is predicted.

    relative: the measured figures are not seconds, but ratios of them.
    """

    shapes: tuple[Shape, ...]
    relative: bool = False

    @property
    def rows(self) -> int:
        return sum(len(shape.measured) for shape in self.shapes)

    @property
    def hits(self) -> int:
        return sum(shape.chosen == shape.best for shape in self.shapes)

    @property
    def pairs(self) -> tuple[int, int]:
        """Pairs that are ordered as measured, and all pairs."""
        found = [pair for shape in self.shapes for pair in shape.ordered_pairs]
        return sum(found), len(found)

    @property
    def mean_regret(self) -> float:
        return statistics.mean(shape.regret for shape in self.shapes)

    @property
    def worst(self) -> Shape:
        return max(self.shapes, key=lambda shape: shape.regret)

    @property
    def ratios(self) -> list[float]:
        """Predicted over measured, of every time."""
        if self.relative:
            return []
        return [
            shape.seconds(form) / shape.measured[form]
            for shape in self.shapes
            for form in shape.measured
        ]

    def without(self, *names: str) -> Score:
        kept = tuple(s for s in self.shapes if s.name not in names)
        return Score(kept, self.relative)


def table(name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(rows, what all rows have in common) of a file in tests/data."""
    content = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return content["rows"], content["common"]


def workload(
    length: int,
    heads: int,
    head_dim: int,
    ranks: int,
    direction: Direction,
    *,
    batch: int = 1,
    kv_heads: int | None = None,
    causal: bool = True,
) -> Workload:
    """Self-attention in 16 bits, as all measured tables have it."""
    return Workload(
        batch=batch,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        q_len=length,
        kv_len=length,
        head_dim=head_dim,
        value_dim=head_dim,
        bytes_per_element=2,
        causal=causal,
        direction=direction,
        ranks=ranks,
    )


def form(ulysses: int, ring: int, layout: Layout = Layout.CONTIGUOUS) -> Candidate:
    degrees = CPDegrees(ulysses, ring)
    if ring == 1 and ulysses > 1:
        return Candidate(Strategy.ULYSSES, degrees)
    strategy = Strategy.RING if ulysses == 1 else Strategy.HYBRID
    return Candidate(strategy, degrees, layout)


def all_gather(ranks: int) -> Candidate:
    return Candidate(Strategy.ALL_GATHER, CPDegrees(1, ranks))


def predicted(
    each: Candidate, load: Workload, hardware: str, **overrides: float
) -> Candidate:
    """A form with its cost, whatever memory it takes."""
    profile = load_profile(hardware).with_overrides(EAGER_SUMS | overrides)
    return predict(each, load, profile, memory_budget=float("inf"))


def shape(
    name: str,
    load: Workload,
    hardware: str,
    rows: Iterable[tuple[Candidate, float]],
) -> Shape:
    """One call; `rows` are forms and seconds, of which equal forms are averaged."""
    times: dict[str, list[float]] = {}
    forms: dict[str, Candidate] = {}
    for each, seconds in rows:
        times.setdefault(each.label, []).append(seconds)
        forms[each.label] = each
    return Shape(
        name,
        {label: predicted(each, load, hardware) for label, each in forms.items()},
        {label: statistics.mean(found) for label, found in times.items()},
        load_profile(hardware).memory_bytes,
    )
