"""Draw how the time of each strategy grows with the sequence and with the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from cpcompile.cost.choose import choose
from cpcompile.cost.crossover import regions, with_length
from cpcompile.cost.hardware.profile import HardwareProfile
from cpcompile.cost.plans import SEQUENCE_STRATEGIES, Plan, Strategy, Workload
from cpcompile.cost.strategies import STRATEGIES
from cpcompile.errors import RewriteError
from cpcompile.geometry.layout import Layout
from cpcompile.reporting.drawing.pictures import Picture, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LONGER, _SHORTER = 8, 64  # times longer, or shorter, than the plan's
_LEAST_TOKENS, _LEAST_RANKS = 512, 64
_MOST_TIMES_FASTEST = 3.0
_Times = dict[Strategy, tuple[float | None, ...]]


@dataclass(frozen=True)
class Crossing:
    """From `size` on, `after` is chosen where `before` was below it."""

    size: int
    before: str
    after: str


@dataclass(frozen=True)
class Curves:
    """Milliseconds of each strategy over sizes; None where it is excluded."""

    sizes: tuple[int, ...]
    milliseconds: _Times
    crossings: tuple[Crossing, ...]


@dataclass(frozen=True)
class Setting:
    """The values that do not change along a curve."""

    workload: Workload
    profile: HardwareProfile
    layouts: tuple[Layout, ...]
    memory_budget: float | None = None

    def plan(self, workload: Workload) -> Plan:
        """Return the plan of another workload. Raises: RewriteError if none exists."""
        return choose(
            workload,
            self.profile,
            layouts=self.layouts,
            memory_budget=self.memory_budget,
        )


def over_length(setting: Setting) -> Curves:
    """Return time over the length of the sequence; crossovers are exact to a token."""

    def plan(length: int) -> Plan:
        return setting.plan(with_length(setting.workload, length))

    now = setting.workload.q_len
    low = max(min(_LEAST_TOKENS, now), now // _SHORTER)
    sizes = []
    size = low
    while size <= _LONGER * now:
        sizes.append(size)
        size *= 2
    intervals = [r for r in regions(plan, low, sizes[-1] + 1) if r.label is not None]
    crossings = [
        Crossing(b.low, a.label or "", b.label or "") for a, b in pairwise(intervals)
    ]
    return Curves(tuple(sizes), _times(plan, sizes), tuple(crossings))


def over_ranks(setting: Setting) -> Curves:
    """Return time over powers of two of ranks, and the ranks of the plan."""

    def plan(ranks: int) -> Plan:
        return setting.plan(replace(setting.workload, ranks=ranks))

    now = setting.workload.ranks
    powers = [2**i for i in range(max(_LEAST_RANKS, 4 * now).bit_length())]
    sizes = sorted({*powers, now})
    crossings, before = [], ""
    for size in sizes:
        label = _chosen(plan, size)
        if label and before and label != before:
            crossings.append(Crossing(size, before, label))
        before = label or before
    return Curves(tuple(sizes), _times(plan, sizes), tuple(crossings))


def draw_curves(setting: Setting) -> Picture:
    """Draw time over tokens and time over ranks, side by side."""
    by_length, by_ranks = over_length(setting), over_ranks(setting)
    workload = setting.workload

    def paint(figure: Figure) -> str:
        panels = figure.subplots(2, 2, sharex="col", height_ratios=(1.3, 1))
        for column, (curves, now, name, title) in enumerate(
            (
                (by_length, workload.q_len, "tokens", f"on {workload.ranks} ranks"),
                (by_ranks, workload.ranks, "ranks", f"{workload.q_len} tokens"),
            )
        ):
            above, below = panels[0, column], panels[1, column]
            _panel(above, curves, curves.milliseconds, now)
            _panel(below, curves, _over_fastest(curves), now)
            _name_crossings(above, curves)
            above.set_title(title)
            above.set_ylabel("predicted time of one call (ms)")
            above.set_yscale("log")
            above.minorticks_off()
            below.set_ylabel("over the fastest")
            below.set_ylim(0.95, _MOST_TIMES_FASTEST)
            below.set_xlabel(f"{name} (grey line: this plan)")
        handles, names = panels[0, 0].get_legend_handles_labels()
        figure.legend(
            handles, names, loc="outside lower center", ncols=4, frameon=False
        )
        return (
            "time over tokens: "
            + (crossings_text(by_length.crossings, "tokens") or "no crossover")
            + "; time over ranks: "
            + (crossings_text(by_ranks.crossings, "ranks") or "no crossover")
        )

    return draw(paint, 6.6)


def crossings_text(crossings: Sequence[Crossing], unit: str) -> str:
    """Return "from 23456 tokens on ring instead of ulysses, ..."."""
    return ", ".join(
        f"from {c.size} {unit} on {c.after} instead of {c.before}" for c in crossings
    )


def _panel(axes: Axes, curves: Curves, values: _Times, now: int) -> None:
    for strategy, heights in values.items():
        row = STRATEGIES[strategy]
        points = [(s, t) for s, t in zip(curves.sizes, heights, strict=True) if t]
        axes.plot(
            [s for s, _ in points],
            [t for _, t in points],
            color=row.color,
            marker=row.marker,
            linestyle=row.line,
            markersize=4,
            label=strategy.value,
        )
    for crossing in curves.crossings:
        axes.axvline(crossing.size, color="black", linewidth=0.7, linestyle=":")
    axes.axvline(now, color="black", linewidth=1.2, alpha=0.35)
    axes.set_xscale("log", base=2)
    axes.minorticks_off()  # a page has hundreds of them
    axes.grid(True, which="major", linewidth=0.3)


def _name_crossings(axes: Axes, curves: Curves) -> None:
    for crossing in curves.crossings:
        axes.annotate(
            f"{crossing.size}: {crossing.after}",
            (crossing.size, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-2, -3),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="top",
            fontsize=7,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
        )


def _over_fastest(curves: Curves) -> _Times:
    rows = list(curves.milliseconds.values())
    best = [
        min((t for t in column if t), default=None)
        for column in zip(*rows, strict=True)
    ]
    return {
        strategy: tuple(
            t / b if t and b else None for t, b in zip(times, best, strict=True)
        )
        for strategy, times in curves.milliseconds.items()
    }


def _times(plan: Callable[[int], Plan], sizes: Sequence[int]) -> _Times:
    times: dict[Strategy, list[float | None]] = {s: [] for s in SEQUENCE_STRATEGIES}
    for size in sizes:
        try:
            candidates = plan(size).candidates
        except RewriteError:
            candidates = ()
        for strategy, row in times.items():
            possible = [
                1e3 * c.seconds
                for c in candidates
                if c.strategy is strategy and c.seconds and c.excluded is None
            ]
            row.append(min(possible, default=None))
    return {strategy: tuple(row) for strategy, row in times.items()}


def _chosen(plan: Callable[[int], Plan], size: int) -> str | None:
    try:
        return plan(size).chosen.label
    except RewriteError:
        return None
