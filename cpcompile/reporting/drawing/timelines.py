"""Draw when each rank computes, waits for messages, and idles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cpcompile.cost.plans.tables import duration
from cpcompile.reporting.drawing.pictures import ACTIVITY_COLORS, Picture, draw
from cpcompile.reporting.drawing.simulated_clocks import Activity, Row, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMES = {
    Activity.COMPUTE: "compute",
    Activity.COMMUNICATION: "waits for a message on its way",
    Activity.IDLE: "idle: waits for a rank that has not sent yet",
}
_MESSAGE = "message on its way (lower lane)"
# More rectangles than this are drawn as pixels, so that a page stays small: one takes
# 200 bytes, and a ring of 128 ranks in 8 rows has 2,000 of them per layout.
_MANY_SPANS = 200
# Straight lines: a dotted hatch is 300 circles, 46 kB in every picture that has it.
_MARK = {Activity.COMMUNICATION: "//", Activity.IDLE: "\\\\", Activity.COMPUTE: ""}


def draw_timelines(timelines: Sequence[Timeline]) -> Picture:
    """Draw one panel per timeline, over the same axis of time."""
    heights = [0.9 + 0.3 * len(t.rows) for t in timelines]

    def paint(figure: Figure) -> str:
        panels = figure.subplots(
            len(timelines), 1, sharex=True, squeeze=False, height_ratios=heights
        )[:, 0]
        for axes, shown in zip(panels, timelines, strict=True):
            _panel(axes, shown)
        panels[-1].set_xlim(0, 1e3 * max(t.seconds for t in timelines) * 1.01)
        panels[-1].set_xlabel("time since the start of the call (ms)")
        _legend(figure)
        return "; ".join(_words(t) for t in timelines)

    return draw(paint, sum(heights) + 0.6)


def _panel(axes: Axes, shown: Timeline) -> None:
    many = sum(len(r.spans) + len(r.messages) for r in shown.rows) > _MANY_SPANS
    for place, row in enumerate(shown.rows):
        _row(axes, place, row, many)
    axes.set_yticks(range(len(shown.rows)), [str(r.rank) for r in shown.rows])
    axes.set_ylim(len(shown.rows) - 0.4, -0.6)
    axes.set_ylabel(_what_rows_are(shown))
    axes.set_title(f"{shown.candidate.label}: {duration(shown.seconds)}", loc="left")


def _row(axes: Axes, place: int, row: Row, many: bool) -> None:
    for activity in Activity:
        spans = [s for s in row.spans if s.activity is activity]
        axes.broken_barh(
            [(1e3 * s.start, 1e3 * s.seconds) for s in spans],
            (place - 0.38, 0.56),
            facecolors=ACTIVITY_COLORS[activity],
            edgecolor="white",
            linewidth=0.0 if many else 0.4,
            hatch=None if many else _MARK[activity],
            rasterized=many,
        )
    axes.broken_barh(
        [(1e3 * s.start, 1e3 * s.seconds) for s in row.messages],
        (place + 0.22, 0.14),
        facecolors=ACTIVITY_COLORS[Activity.COMMUNICATION],
        linewidth=0.0,
        rasterized=many,
    )


def _legend(figure: Figure) -> None:
    from matplotlib.patches import Patch  # optional, see draw

    patches = [
        Patch(
            facecolor=ACTIVITY_COLORS[a],
            edgecolor="white",
            hatch=_MARK[a],
            label=_NAMES[a],
        )
        for a in Activity
    ]
    thin = ACTIVITY_COLORS[Activity.COMMUNICATION]
    patches.append(Patch(facecolor=thin, linewidth=0.0, label=_MESSAGE))
    figure.legend(handles=patches, loc="outside upper center", ncols=4, frameon=False)


def _what_rows_are(shown: Timeline) -> str:
    if shown.positions == 1:
        return "every rank"
    return "rank" if shown.ranks_per_row == 1 else "position\nin the ring"


def _words(shown: Timeline) -> str:
    waits = {
        activity: max(
            sum(s.seconds for s in row.spans if s.activity is activity)
            for row in shown.rows
        )
        for activity in Activity
    }
    return (
        f"timeline of {shown.candidate.label}, {duration(shown.seconds)}: a rank "
        f"computes {duration(waits[Activity.COMPUTE])} at most, waits for messages "
        f"{duration(waits[Activity.COMMUNICATION])} at most, and idles "
        f"{duration(waits[Activity.IDLE])} at most"
    )
