"""The decision for one attention call, and everything that was considered."""

from __future__ import annotations

from dataclasses import dataclass

from cpcompile.cost.hardware.profile import HardwareProfile
from cpcompile.cost.plans.tables import (
    CANDIDATE_HEADER,
    candidate_row,
    duration,
    ranks_text,
    text_table,
    workload_text,
)
from cpcompile.cost.plans.workload import Candidate, Strategy, Workload
from cpcompile.geometry.layout import Layout

# Times that differ by no more than this part of the best are a tie.
TIE_FRACTION = 0.05


@dataclass(frozen=True)
class Plan:
    """The decision for one attention call; `candidates` are best first.

    Print it for a table of them.
    """

    workload: Workload
    chosen: Candidate
    forced: bool  # the user named the strategy
    profile: HardwareProfile  # by whose rates it was made
    candidates: tuple[Candidate, ...]

    @property
    def hardware(self) -> str:
        """Name of the hardware profile."""
        return self.profile.name

    @property
    def strategy(self) -> Strategy:
        """The strategy that was chosen."""
        return self.chosen.strategy

    @property
    def layout(self) -> Layout:
        """The layout that was chosen."""
        return self.chosen.layout

    @property
    def runner_up(self) -> Candidate | None:
        """The best possible candidate that was not chosen, if there is one."""
        alternatives = (c for c in self.candidates if c is not self.chosen)
        return next((c for c in alternatives if c.excluded is None), None)

    def runner_up_text(self, tie_fraction: float = TIE_FRACTION) -> str:
        """Return "all_gather +53 %", with "(tie)" if the difference does not count."""
        other, best = self.runner_up, self.chosen.seconds
        if self.workload.ranks == 1 or other is None or not other.seconds or not best:
            return "none"
        gap = other.seconds / best - 1
        tie = " (tie)" if abs(gap) <= tie_fraction else ""
        return f"{other.label} {100 * gap:+.0f} %{tie}"

    def decision_text(self, layers: int = 0) -> str:
        """Write ranks, choice, time per layer and over `layers`, and the runner-up."""
        seconds = self.chosen.seconds or 0.0
        total = f", {duration(layers * seconds)} over {layers} layers" if layers else ""
        return (
            f"{ranks_text(self.workload.ranks)}: {self.chosen.label}, "
            f"{duration(seconds)} per layer{total}; runner-up {self.runner_up_text()}"
        )

    def table(self) -> str:
        """List all candidates, the chosen one marked; one rank has only one."""
        shown = self.candidates if self.workload.ranks > 1 else (self.chosen,)
        rows = [(">" if c is self.chosen else "", *candidate_row(c)) for c in shown]
        return text_table([("", *CANDIDATE_HEADER), *rows], indent="")

    def __str__(self) -> str:
        lines = [
            workload_text(self.workload),
            f"predicted for {self.hardware}, "
            f"{ranks_text(int(self.profile.ranks_per_node))} per node",
            "",
            self.decision_text(),
            self.table(),
        ]
        return "\n".join(lines)
