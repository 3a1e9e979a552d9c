"""Draw plans with matplotlib (the extra `plot`), one below the other in one file.

A plan is drawn as
    timelines   when each rank computes, waits for messages and idles: under the chosen
                candidate, and in a ring with each layout
    maps        how the work of a ring lies on ranks and steps with each layout
    curves      how the time of each strategy grows with the sequence and the ranks

Colours, here and in cost/strategies.py, are those of Okabe and Ito
(jfly.uni-koeln.de/color), which stay apart for readers who do not see red and green;
nothing is told by colour alone.

Note [The clocks of a ring]
Rank a starts step t + 1 when it has computed step t and the chunk from rank a - 1 has
arrived, which leaves once both have started step t. Under contiguous causal attention
ranks with fewer visible chunks compute less and wait more. The last rank to end ends
at the predicted time: work is bounded by the last rank's, which the model charges, and
whoever it waits for has as much to compute until then. Forward and backward are drawn
as starting on all ranks together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import sympy  # type: ignore[import-untyped]  # sympy ships no type information

from cpcompile.cost import model, symbols
from cpcompile.cost.choose import choose, predict
from cpcompile.cost.crossover import regions, with_length
from cpcompile.cost.evaluate import evaluator
from cpcompile.cost.hardware.profile import HardwareProfile
from cpcompile.cost.plans import (
    SEQUENCE_STRATEGIES,
    Candidate,
    Direction,
    Plan,
    Strategy,
    Workload,
)
from cpcompile.cost.plans.tables import duration
from cpcompile.cost.strategies import STRATEGIES
from cpcompile.errors import RewriteError
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout
from cpcompile.geometry.work_map import Table, work
from cpcompile.reporting.plan_facts import plan_layouts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

Clock = npt.NDArray[np.float64]
Filling = tuple[float, Callable[["SubFigure"], None]]
"""Height of a panel in inches, and what fills it."""

_SETTINGS: dict[Any, Any] = {"svg.fonttype": "none", "font.size": 9}  # text stays text
_MOST_RANKS = 1024  # a picture with more would have no pixel for each
_MOST_NUMBERS = 8  # ranks up to which numbers are written into the cells of a map
_MANY_SPANS = 200  # more rectangles are drawn as pixels, so that a file stays small


def draw(
    path: Path, plans: Mapping[str, Plan], memory_budget: float | None = None
) -> None:
    """Draw plans, by their titles, into a file of any format that matplotlib writes.

    memory_budget: of the plans, for other lengths and ranks.
    Raises: ImportError without matplotlib, naming the extra; ValueError for another
    format.
    """
    try:
        # Optional, and slow to import.
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'pictures need matplotlib: pip install "cpcompile[plot]"'
        ) from error
    with rc_context(_SETTINGS):
        panels = [
            panel
            for name, plan in plans.items()
            for panel in _panels(name, plan, memory_budget)
        ]
        heights = [height for _, height, _ in panels]
        figure = Figure(figsize=(10, sum(heights)), layout="constrained")
        parts = figure.subfigures(len(panels), 1, height_ratios=heights, squeeze=False)
        for part, (title, _, paint) in zip(parts[:, 0], panels, strict=True):
            part.suptitle(title)
            paint(part)
        figure.savefig(path, format=path.suffix[1:] or "svg")


def _panels(
    name: str, plan: Plan, memory_budget: float | None
) -> Iterator[tuple[str, *Filling]]:
    workload, profile = plan.workload, plan.profile
    lengths = workload.q_len, workload.kv_len
    equal = len({*lengths}) == 1
    if workload.ranks <= _MOST_RANKS:
        shown = timeline(plan.chosen, workload, profile)
        yield f"{name}: {plan.chosen.label}", *_timelines([shown])
    if 1 < workload.ranks <= _MOST_RANKS:
        layouts = Layout if workload.causal and equal else (Layout.CONTIGUOUS,)
        degrees = CPDegrees(1, workload.ranks)
        rings = [
            timeline(Candidate(Strategy.RING, degrees, layout), workload, profile, 8)
            for layout in layouts
        ]
        yield f"{name}: the same call as a ring in each layout", *_timelines(rings)
    size = workload.ranks
    if plan.strategy is Strategy.HYBRID:
        size = plan.chosen.degrees.ring
    if 1 < size <= _MOST_RANKS:
        tables = {
            layout: work(layout, *lengths, size, causal=workload.causal)
            for layout in (Layout if equal else (Layout.CONTIGUOUS,))
        }
        yield f"{name}: work by rank and step of a ring of {size}", *_maps(tables)
    if not STRATEGIES[plan.strategy].few_queries:  # the only one that is possible
        decide = partial(choose, profile=profile, memory_budget=memory_budget)
        curves = _curves(workload, partial(decide, layouts=plan_layouts(plan)))
        yield f"{name}: crossovers", *curves


class Activity(Enum):
    """What a rank does at a time, and a message that arrives meanwhile.

    A value has the words, the colour, and a hatch of straight lines.
    """

    COMPUTE = ("compute", "#0072B2", "")
    COMMUNICATION = ("waits for a message on its way", "#E69F00", "//")
    IDLE = ("idle: waits for a rank that has not sent yet", "#D9D9D9", "\\\\")
    MESSAGE = ("message on its way (lower lane)", "#E69F00", "")


class Timeline:
    """Clocks of all positions of a ring, and what some of them do when.

    rows: by position, spans of each activity: start in seconds since the start of the
        call, and seconds. Those of a rank are without gaps, but for messages.
    """

    def __init__(self, candidate: Candidate, rows: int) -> None:
        self.candidate, self.positions = candidate, candidate.degrees.ring
        shown = np.linspace(0, self.positions - 1, min(rows, self.positions)).round()
        self.rows: dict[int, dict[Activity, list[tuple[float, float]]]] = {
            int(i): {activity: [] for activity in Activity} for i in shown
        }
        self.now: Clock = np.zeros(self.positions)

    @property
    def seconds(self) -> float:
        """Seconds until the last rank ends."""
        return float(self.now.max())

    def note(self, activity: Activity, begin: Clock, end: Clock) -> None:
        """Note a span of every position, which takes no time of its clock."""
        for position, spans in self.rows.items():
            seconds = float(end[position] - begin[position])
            if seconds > 0:
                spans[activity].append((float(begin[position]), seconds))

    def advance(self, activity: Activity, until: Clock) -> None:
        """Let every position do `activity` until its time in `until`."""
        self.note(activity, self.now, until)
        self.now = np.maximum(self.now, until)

    def compute(self, seconds: float | Clock) -> None:
        self.advance(Activity.COMPUTE, self.now + seconds)

    def communicate(self, seconds: float) -> None:
        self.note(Activity.MESSAGE, self.now, self.now + seconds)
        self.advance(Activity.COMMUNICATION, self.now + seconds)

    def meet(self) -> None:
        """Let all positions wait for the slowest."""
        self.advance(Activity.IDLE, np.full(self.positions, self.now.max()))


def timeline(
    candidate: Candidate, workload: Workload, profile: HardwareProfile, rows: int = 16
) -> Timeline:
    """Simulate when `candidate`, of a plan of `workload` and `profile`, does what.

    It adds up the terms of the cost model; see Note [The clocks of a ring]. `rows` of
    the ranks are shown, from first to last.
    """
    run = Timeline(candidate, rows)
    for backward in (False, True):
        direction = Direction.BACKWARD if backward else Direction.FORWARD
        if workload.direction in (Direction.BOTH, direction):
            _simulate(run, replace(workload, direction=direction), profile)
            run.meet()
    return run


def _simulate(run: Timeline, call: Workload, profile: HardwareProfile) -> None:
    """Simulate a pass: messages, attention, messages; by groups of heads if there are.

    Of all ranks that attend to gathered keys, the last one has the most to compute.
    """
    form, backward = run.candidate, call.direction is Direction.BACKWARD
    cost = predict(form, call, profile, math.inf)
    seconds, exposed = cost.seconds or 0.0, cost.exposed_seconds or 0.0
    values = _values(form, call, profile)
    ahead = 0.0
    if exposed > 0:
        (ahead,) = values(_ahead(form.strategy, backward))
    if form.strategy in (Strategy.RING, Strategy.HYBRID):
        steps_exposed, copies = values(
            model.ring_cost(call.causal, form.layout, backward).exposed,
            symbols.SEVERAL_STEPS * model.COPY_SECONDS
            + model.exchange_copy_seconds(backward),
        )
        around = exposed - steps_exposed
        run.communicate(ahead * around)
        run.compute(copies)
        _ring_steps(run, call, profile)
        run.communicate((1 - ahead) * around)
        return
    attention: float | Clock = seconds - exposed
    if call.causal and form.layout is Layout.CONTIGUOUS and run.positions > 1:
        size = call.q_len, call.kv_len, run.positions
        pairs = work(form.layout, *size, causal=True).sum(axis=1)
        attention = attention * pairs / max(1, pairs.max())
    groups = form.head_groups
    transfer = (exposed + (cost.hidden_seconds or 0.0)) / groups
    run.communicate(ahead * transfer)
    for others in reversed(range(groups)):
        run.note(Activity.MESSAGE, run.now, run.now + transfer * (others > 0))
        run.compute(attention / groups)
        if others:
            waited = (exposed - transfer) / (groups - 1)
            run.advance(Activity.COMMUNICATION, run.now + waited)
    run.meet()
    run.communicate((1 - ahead) * transfer)


def _ahead(strategy: Strategy, backward: bool) -> sympy.Expr:
    """Return the part of what is sent that is sent before the attention."""
    if strategy is Strategy.SPLIT_KV:
        return sympy.Integer(0)
    if strategy in (Strategy.ALL_GATHER, Strategy.LATENTS):
        forward, sent = (
            STRATEGIES[strategy].cost(False, Layout.CONTIGUOUS, x).transfer
            for x in (False, backward)
        )
        return forward / sent
    return (model.OUTPUT if backward else model.QKV) / model.SENT


def _ring_steps(run: Timeline, call: Workload, profile: HardwareProfile) -> None:
    """Simulate the steps of a ring; see Note [The clocks of a ring]."""
    form, backward = run.candidate, call.direction is Direction.BACKWARD
    values = _values(form, call, profile)
    first, later, count, runs, hidden, latency, kv_hop, gradient_hop = values(
        *model.steps_seconds(call.causal, form.layout, backward),
        *(symbols.steps, symbols.pieces, symbols.overlap, symbols.hop),
        symbols.hop + symbols.e * model.KV / symbols.W,
        int(backward) * (symbols.hop + symbols.SUM_BYTES * model.KV / symbols.W),
    )
    fewer = later  # of a rank whose queries come before the keys
    if call.causal and form.layout is Layout.CONTIGUOUS:
        # Of p * p pairs of runs it sees p (p - 1) / 2, where others see p (p + 1) / 2.
        fewer = later * (runs - 1) / (runs + 1)
    size = round(count)
    position = np.arange(run.positions)
    for step in range(size):
        seconds = np.where(position >= step, later if step else first, fewer)
        transfer = kv_hop * (step < size - 1) + gradient_hop * (step > 0)
        messages = (step < size - 1) + (backward and step > 0)
        sending = transfer - messages * latency
        slowed = (1 - hidden) * np.minimum(sending, seconds)
        begin = np.maximum(run.now, np.roll(run.now, 1))
        run.note(Activity.MESSAGE, begin, begin + transfer)
        run.compute(seconds)
        if transfer > 0:
            arrived = np.maximum(run.now, begin + transfer) + slowed
            run.advance(Activity.IDLE, np.minimum(begin, arrived))
            run.advance(Activity.COMMUNICATION, arrived)
    if gradient_hop and size > 1:  # dK and dV go home
        run.advance(Activity.IDLE, np.maximum(run.now, np.roll(run.now, 1)))
        run.communicate(gradient_hop)


def _values(
    form: Candidate, call: Workload, profile: HardwareProfile
) -> Callable[..., list[float]]:
    """Return a function that evaluates formulas of the cost model for a candidate."""
    by_symbol = symbols.numbers(call, form.degrees, profile, form.head_groups)
    values = [by_symbol[symbol] for symbol in symbols.SYMBOLS]
    return lambda *formulas: evaluator(symbols.SYMBOLS, formulas)(*values)


def _timelines(timelines: Sequence[Timeline]) -> Filling:
    """Draw one timeline below the other, over the same axis of time."""
    heights = [0.9 + 0.3 * len(t.rows) for t in timelines]

    def paint(figure: SubFigure) -> None:
        from matplotlib.patches import Patch  # optional, see draw

        panels = figure.subplots(
            len(timelines), 1, sharex=True, squeeze=False, height_ratios=heights
        )[:, 0]
        for axes, shown in zip(panels, timelines, strict=True):
            _timeline(axes, shown)
        panels[-1].set_xlim(0, 1e3 * max(t.seconds for t in timelines) * 1.01)
        panels[-1].set_xlabel("time since the start of the call (ms)")
        patches = [
            Patch(facecolor=color, edgecolor="white", hatch=hatch, label=words)
            for words, color, hatch in (activity.value for activity in Activity)
        ]
        figure.legend(handles=patches, loc="outside lower center", ncols=4)

    return sum(heights) + 0.9, paint


def _timeline(axes: Axes, shown: Timeline) -> None:
    many = sum(map(len, (x for row in shown.rows.values() for x in row.values())))
    for place, row in enumerate(shown.rows.values()):
        for activity, spans in row.items():
            _, color, hatch = activity.value
            lane = (0.22, 0.14) if activity is Activity.MESSAGE else (-0.38, 0.56)
            axes.broken_barh(
                [(1e3 * start, 1e3 * seconds) for start, seconds in spans],
                (place + lane[0], lane[1]),
                facecolors=color,
                edgecolor="white",
                linewidth=0.0 if many > _MANY_SPANS else 0.4,
                hatch=None if many > _MANY_SPANS else hatch,
                rasterized=many > _MANY_SPANS,
            )
    axes.set_yticks(range(len(shown.rows)), [str(position) for position in shown.rows])
    axes.set_ylim(len(shown.rows) - 0.4, -0.6)
    one = shown.candidate.degrees.ulysses == 1
    place_text = "rank" if one else "position\nin the ring"
    axes.set_ylabel("every rank" if shown.positions == 1 else place_text)
    axes.set_title(f"{shown.candidate.label}: {duration(shown.seconds)}", loc="left")


def _maps(tables: Mapping[Layout, Table]) -> Filling:
    """Draw pairs by rank and step, one panel per layout."""
    most = max(1, *(int(table.max()) for table in tables.values()))

    def paint(figure: SubFigure) -> None:
        from matplotlib.ticker import EngFormatter  # optional, see draw

        write = EngFormatter(places=0, sep="")
        panels = figure.subplots(1, len(tables), squeeze=False)[0]
        for axes, (layout, table) in zip(panels, tables.items(), strict=True):
            image = axes.imshow(table, cmap="Blues", vmin=0, vmax=most)
            axes.set_title(f"{layout.value}\n{_imbalance(table)}", fontsize=9)
            axes.set_xlabel("step")
            if len(table) > _MOST_NUMBERS:
                continue
            axes.set_xticks(range(len(table)))
            axes.set_yticks(range(len(table)))
            for (rank, step), count in np.ndenumerate(table):
                color = "white" if count > 0.6 * most else "black"
                style: Any = {"color": color, "ha": "center", "va": "center"}
                axes.text(step, rank, write(float(count)), **style, fontsize=6)
        panels[0].set_ylabel("rank")
        bar = figure.colorbar(
            image, ax=panels, location="bottom", shrink=0.5, aspect=40, format=write
        )
        bar.set_label("(query, key) pairs that a rank computes in a step, per head")

    return 4.2, paint


def _imbalance(table: Table) -> str:
    """Say how far the slowest rank, and the slowest of each step, exceed the mean."""
    totals, mean = table.sum(axis=1), table.sum() / len(table)
    if mean == 0:
        return "no work"
    return (
        f"slowest rank {totals.max() / mean:.3f} x mean,\n"
        f"slowest of each step {table.max(axis=0).sum() / mean:.3f} x"
    )


@dataclass(frozen=True)
class Curves:
    """Milliseconds of each strategy over sizes, nan where it is excluded.

    crossings: sizes from which on another candidate is chosen, by its label.
    """

    sizes: tuple[int, ...]
    milliseconds: dict[Strategy, Clock]
    crossings: dict[int, str]


Decision = Callable[[Workload], Plan]
"""Plans another workload. Raises RewriteError if there is no plan."""


def over_length(workload: Workload, decide: Decision) -> Curves:
    """Return time over the length of the sequence; crossovers are exact to a token."""
    now = workload.q_len
    sizes = [max(min(512, now), now // 64)]
    while 2 * sizes[-1] <= 8 * now:
        sizes.append(2 * sizes[-1])

    def longer(length: int) -> Plan:
        return decide(with_length(workload, length))

    intervals = [r for r in regions(longer, sizes[0], sizes[-1] + 1) if r.label]
    crossings = {after.low: after.label or "" for _, after in pairwise(intervals)}
    plans = {size: _or_none(decide, with_length(workload, size)) for size in sizes}
    return Curves(tuple(sizes), _milliseconds(plans), crossings)


def over_ranks(workload: Workload, decide: Decision) -> Curves:
    """Return time over powers of two of ranks, and the ranks of the plan."""
    now = workload.ranks
    sizes = sorted({now, *(2**i for i in range(max(64, 4 * now).bit_length()))})
    plans = {n: _or_none(decide, replace(workload, ranks=n)) for n in sizes}
    labels = {n: plan.chosen.label for n, plan in plans.items() if plan is not None}
    crossings = {n: labels[n] for m, n in pairwise(labels) if labels[m] != labels[n]}
    return Curves(tuple(sizes), _milliseconds(plans), crossings)


def _or_none(decide: Decision, workload: Workload) -> Plan | None:
    try:
        return decide(workload)
    except RewriteError:
        return None


def _milliseconds(plans: Mapping[int, Plan | None]) -> dict[Strategy, Clock]:
    """Return the time of the best form of each strategy that is possible."""
    times: dict[Strategy, Clock]
    times = {strategy: np.full(len(plans), np.nan) for strategy in SEQUENCE_STRATEGIES}
    for i, plan in enumerate(plans.values()):
        for c in plan.candidates if plan is not None else ():
            if c.strategy in times and c.seconds and c.excluded is None:
                times[c.strategy][i] = np.fmin(times[c.strategy][i], 1e3 * c.seconds)
    return times


def _curves(workload: Workload, decide: Decision) -> Filling:
    """Draw time over tokens and time over ranks, and below each over the fastest."""
    columns = (
        (over_length(workload, decide), workload.q_len, "tokens"),
        (over_ranks(workload, decide), workload.ranks, "ranks"),
    )

    def paint(figure: SubFigure) -> None:
        panels = figure.subplots(2, 2, sharex="col", height_ratios=(1.3, 1))
        for (curves, now, name), (above, below) in zip(columns, panels.T, strict=True):
            sizes = np.array(curves.sizes)
            fastest = np.fmin.reduce(list(curves.milliseconds.values()))
            for strategy, times in curves.milliseconds.items():
                row, possible = STRATEGIES[strategy], np.isfinite(times)
                look = dict(zip(("color", "marker", "ls"), row.look, strict=True))
                look |= {"label": strategy.value}
                for axes, heights in ((above, times), (below, times / fastest)):
                    axes.plot(sizes[possible], heights[possible], ms=4, **look)
            for axes in (above, below):
                axes.axvline(now, color="black", alpha=0.35)
                for size in curves.crossings:
                    axes.axvline(size, color="black", linewidth=0.7, linestyle=":")
                axes.set_xscale("log", base=2)
                axes.grid(True, which="major", linewidth=0.3)
            for size, label in curves.crossings.items():
                above.annotate(
                    f"{size}: {label}",
                    (size, 0.98),
                    xycoords=("data", "axes fraction"),
                    rotation=90,
                    ha="right",
                    va="top",
                    fontsize=7,
                )
            above.set(ylabel="predicted time of one call (ms)", yscale="log")
            below.set(ylabel="over the fastest", ylim=(0.95, 3.0))
            below.set_xlabel(
                f"{name} (grey: this plan; dotted: from here on what stands beside)"
            )
        names = panels[0, 0].get_legend_handles_labels()
        figure.legend(*names, loc="outside lower center", ncols=6)

    return 6.9, paint
