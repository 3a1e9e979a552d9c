"""Draw how the work of a ring lies on ranks and steps under each layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpcompile.cost.plans import Workload
from cpcompile.geometry.layout import Layout
from cpcompile.reporting.drawing.pictures import MAP_OF_WORK, Picture, draw
from cpcompile.reporting.drawing.work_map import Table, work

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_NUMBERS = 8  # ranks up to which numbers are written into the cells
_UNITS = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


def draw_heat_maps(workload: Workload, ring: int) -> Picture:
    """Draw pairs by rank and step of a ring of `ring` ranks, one panel per layout.

    If the numbers of keys and queries differ, there is only the contiguous layout.
    """
    equal = workload.q_len == workload.kv_len
    tables = {
        layout: work(
            layout, workload.q_len, workload.kv_len, ring, causal=workload.causal
        )
        for layout in (Layout if equal else (Layout.CONTIGUOUS,))
    }
    most = max(1, *(int(table.max()) for table in tables.values()))

    def paint(figure: Figure) -> str:
        panels = figure.subplots(1, len(tables), squeeze=False)[0]
        for axes, (layout, table) in zip(panels, tables.items(), strict=True):
            image = axes.imshow(
                table, cmap=MAP_OF_WORK, vmin=0, vmax=most, interpolation="nearest"
            )
            _panel(axes, layout, table, most)
        panels[0].set_ylabel("rank")
        bar = figure.colorbar(
            image, ax=panels, location="bottom", shrink=0.5, aspect=40, format=_tick
        )
        bar.set_label("(query, key) pairs that a rank computes in a step, per head")
        return "work by rank and step: " + "; ".join(
            f"{layout.value}: {_imbalance(table)}" for layout, table in tables.items()
        )

    return draw(paint, 3.9)


def short(count: int) -> str:
    """Write a count with three digits and a unit of 1000s: "134M"."""
    for unit, letter in _UNITS:
        if count >= unit:
            return f"{count / unit:.3g}{letter}"
    return str(count)


def _tick(count: float, _: object) -> str:
    return short(int(count))


def _panel(axes: Axes, layout: Layout, table: Table, most: int) -> None:
    axes.set_title(f"{layout.value}\n{_imbalance(table)}", fontsize=9)
    axes.set_xlabel("step")
    ranks = len(table)
    if ranks > _MOST_NUMBERS:
        return
    axes.set_xticks(range(ranks))
    axes.set_yticks(range(ranks))
    for rank in range(ranks):
        for step in range(ranks):
            count = int(table[rank, step])
            color = "white" if count > 0.6 * most else "black"
            axes.text(
                x=step,
                y=rank,
                s=short(count),
                color=color,
                ha="center",
                va="center",
                fontsize=6 if ranks > 4 else 7,
            )


def _imbalance(table: Table) -> str:
    """Say how far the slowest rank, and the slowest of each step, exceed the mean."""
    totals, mean = table.sum(axis=1), table.sum() / len(table)
    if mean == 0:
        return "no work"
    steps = table.max(axis=0).sum()
    return (
        f"slowest rank {totals.max() / mean:.3f} x mean,\n"
        f"slowest of each step {steps / mean:.3f} x"
    )
