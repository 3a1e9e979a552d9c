"""Facts that a plan implies: what is out, and which layouts were compared."""

from __future__ import annotations

from cpcompile.cost.plans import Plan
from cpcompile.geometry.layout import Layout


def candidate_notes(plan: Plan) -> list[str]:
    """Return one text per reason: "ring zigzag, all_gather zigzag are out: ..."."""
    reasons: dict[str, list[str]] = {}
    for candidate in plan.candidates:
        if candidate.excluded is not None:
            reasons.setdefault(candidate.excluded, []).append(candidate.label)
    return [
        f"{', '.join(labels)} {'are' if len(labels) > 1 else 'is'} out: {reason}"
        for reason, labels in reasons.items()
    ]


def plan_layouts(plan: Plan) -> tuple[Layout, ...]:
    """Return the layouts that were compared, in the order that `choose` wants."""
    compared = {candidate.layout for candidate in plan.candidates}
    return tuple(layout for layout in Layout if layout in compared)
