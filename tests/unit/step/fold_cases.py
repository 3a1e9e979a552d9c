"""Steps of the fold layout, in which even and odd rows see different keys."""

from __future__ import annotations

from dataclasses import dataclass

from cpcompile.geometry.visibility import Visible
from tests.support.pairwise import selected_cases
from tests.unit.step.step_cases import AXES, Limits, StepCase


@dataclass(frozen=True)
class FoldCase(StepCase):
    """A StepCase with the limits of fold in the place of `mask`."""

    upper: tuple[int, int] = (1, 0)

    @property
    def limits(self) -> Limits:
        """What the rows see of the chunk."""
        return Limits(Visible(upper=self.upper))


FOLD_AXES = AXES | {
    "mask": ("fold",),
    "upper": ((1, 0), (0, 1)),
    "sizes": ((8, 8), (9, 9), (8, 9), (9, 8), (70, 71), (2, 2), (2, 1), (1, 2), (1, 1)),
}


def fold_cases() -> list[FoldCase]:
    """Both directions of a round, on even and odd numbers of rows and keys."""
    return [FoldCase(**values) for values in selected_cases(FOLD_AXES)]
