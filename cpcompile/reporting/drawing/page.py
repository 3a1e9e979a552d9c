"""One HTML page that holds everything it shows: tables, and pictures as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from cpcompile.cost.choose import predict
from cpcompile.cost.hardware.profile import HardwareProfile
from cpcompile.cost.plans import Candidate, Plan, Strategy, Workload
from cpcompile.cost.plans.tables import (
    CANDIDATE_HEADER,
    candidate_row,
    duration,
    is_number,
    workload_text,
)
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout
from cpcompile.reporting.drawing.curves import Setting, draw_curves
from cpcompile.reporting.drawing.heat_maps import draw_heat_maps
from cpcompile.reporting.drawing.pictures import Picture
from cpcompile.reporting.drawing.simulate import timeline
from cpcompile.reporting.drawing.simulated_clocks import Timeline
from cpcompile.reporting.drawing.timelines import draw_timelines
from cpcompile.reporting.plan_facts import plan_layouts

# A picture with more ranks than this would have no pixel for each.
_MOST_RANKS = 1024
_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --faint: #555;
        --line: #ddd; --marked: #eef5fb; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --paper: #16181c; --faint: #a8a8a8; --line: #3a3d44;
          --marked: #1d3346; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink);
       background: var(--paper); max-width: 76rem; margin: 2rem auto;
       padding: 0 1rem; overflow-wrap: anywhere; }
h1, h2, h3 { line-height: 1.2; font-weight: 600; }
h2 { margin-top: 3rem; border-top: 2px solid var(--ink); padding-top: 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; }
th, td { text-align: left; padding: .2rem .7rem .2rem 0; white-space: nowrap;
         border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
td.number { text-align: right; }
tr.chosen td { font-weight: 600; background: var(--marked); }
tr.out td { color: var(--faint); }
figure { margin: 1.5rem 0; }
figure img { width: 100%; height: auto; background: #fff; border-radius: 4px; }
figcaption { color: var(--faint); max-width: 60rem; }
"""


@dataclass(frozen=True)
class Table:
    """Rows of words under a header."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Section:
    """One plan of the page.

    calls: the attention calls that have this plan.
    layers: calls per pass of the model, for the total.
    """

    title: str
    plan: Plan
    calls: tuple[str, ...] = ()
    layers: int | None = None
    memory_budget: float | None = None


def page(
    title: str, lines: Sequence[str], table: Table | None, sections: Sequence[Section]
) -> str:
    """Return the page as HTML text.

    Raises: ImportError without matplotlib, naming the extra.
    """
    parts = [f"<h1>{escape(title)}</h1>"]
    parts += [f"<p>{escape(line)}</p>" for line in lines]
    if table is not None:
        parts.append(_table(table, [""] * len(table.rows)))
    for section in sections:
        parts += _section(section)
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _section(section: Section) -> Iterator[str]:
    plan, chosen = section.plan, section.plan.chosen
    yield f"<h2>{escape(section.title)}</h2>"
    if section.calls:
        yield f"<p>Calls: {escape(', '.join(section.calls))}</p>"
    yield f"<p>{escape(workload_text(plan.workload))}; {plan.workload.ranks} ranks</p>"
    how = "forced by the options" if plan.forced else "chosen"
    total = ""
    if section.layers is not None and chosen.seconds is not None:
        total = (
            f", {duration(section.layers * chosen.seconds)} over {section.layers} calls"
        )
    yield (
        f"<p><strong>{escape(chosen.label)}</strong> is {how}: "
        f"{duration(chosen.seconds or 0.0)} per call{total}, predicted with the rates "
        f"of {escape(plan.hardware)}.</p>"
    )
    classes = [_class(candidate, plan) for candidate in plan.candidates]
    rows = tuple(candidate_row(candidate) for candidate in plan.candidates)
    yield _table(Table(CANDIDATE_HEADER, rows), classes)
    yield from _pictures(section)


def _pictures(section: Section) -> Iterator[str]:
    plan = section.plan
    workload, profile = plan.workload, plan.profile
    if workload.ranks <= _MOST_RANKS:
        yield from _timelines(plan, workload, profile)
    ring = plan.chosen.degrees.ring
    ring = ring if plan.strategy is Strategy.HYBRID else workload.ranks
    if 1 < ring <= _MOST_RANKS:
        yield "<h3>Work by rank and step</h3>" + _figure(
            draw_heat_maps(workload, ring),
            f"(query, key) pairs of each step in a ring of {ring}, for one head and "
            "sequence, counted by the definition of each layout.",
        )
    setting = Setting(workload, profile, plan_layouts(plan), section.memory_budget)
    yield "<h3>Crossovers</h3>" + _figure(
        draw_curves(setting),
        "The best form of each strategy that is possible there. Dotted lines: the "
        "choice changes, and from there on it is what stands beside the line.",
    )


def _timelines(
    plan: Plan, workload: Workload, profile: HardwareProfile
) -> Iterator[str]:
    shown = timeline(plan.chosen, workload, profile)
    yield "<h3>Timeline</h3>" + _figure(draw_timelines([shown]), _rows_text(shown))
    if workload.ranks == 1:
        return
    balanced = workload.causal and workload.q_len == workload.kv_len
    rings = [
        timeline(ring_candidate(layout, workload, profile), workload, profile, rows=8)
        for layout in (Layout if balanced else (Layout.CONTIGUOUS,))
    ]
    yield "<h3>The ring in each layout</h3>" + _figure(
        draw_timelines(rings), f"The same call as a ring. {_rows_text(rings[0])}"
    )


def ring_candidate(
    layout: Layout, workload: Workload, profile: HardwareProfile
) -> Candidate:
    """Return a ring over all ranks with its cost, whatever memory it takes."""
    form = Candidate(Strategy.RING, CPDegrees(1, workload.ranks), layout)
    return predict(form, workload, profile, math.inf)


def _rows_text(shown: Timeline) -> str:
    if shown.positions == 1:
        return "All ranks do the same at the same time."
    if len(shown.rows) < shown.positions:
        which = f"{len(shown.rows)} of {shown.positions}, from the first to the last"
    else:
        which = f"all {shown.positions}"
    if shown.ranks_per_row == 1:
        return f"Ranks shown: {which}."
    return (
        f"Positions in the ring that are shown: {which}; the {shown.ranks_per_row} "
        "ranks of each do the same at the same time."
    )


def _class(candidate: Candidate, plan: Plan) -> str:
    if candidate is plan.chosen:
        return "chosen"
    return "out" if candidate.excluded is not None else ""


def _table(table: Table, classes: Sequence[str]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    body = "\n".join(
        f'<tr class="{css}">' + "".join(map(_cell, row)) + "</tr>"
        for row, css in zip(table.rows, classes, strict=True)
    )
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _cell(text: str) -> str:
    css = ' class="number"' if is_number(text) else ""
    return f"<td{css}>{escape(text)}</td>"


def _figure(picture: Picture, caption: str) -> str:
    return (
        f"<figure>{picture.html}\n<figcaption>{escape(caption)}</figcaption></figure>"
    )
