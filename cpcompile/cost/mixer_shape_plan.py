"""The decision for a sequence mixer of a given shape, and what was considered."""

from __future__ import annotations

from dataclasses import dataclass

from cpcompile.cost.hardware.profile import HardwareProfile
from cpcompile.cost.mixer_plan import MixerPlan, MixerStrategy
from cpcompile.cost.mixer_shapes import KernelWork, MixerKind, MixerShape
from cpcompile.cost.plans import TIE_FRACTION, Direction
from cpcompile.cost.plans.tables import duration, milliseconds, ranks_text, text_table

HEADER = ("strategy", "along", "ms/layer", "shared ms", "wire MB", "excluded because")


@dataclass(frozen=True)
class MixerCandidate:
    """One way to share a mixer, with its cost on the slowest rank, or why it is out.

    dim: the dimension that is exchanged for the tokens.
    seconds: the whole call, in the direction of the plan.
    beyond_share: the part of these that one of `ranks` equal shares of the work of one
        device would not take: messages, work that is done twice, uneven heads.
    wire_bytes: received by the first rank, which has as much as any other.
    """

    strategy: MixerStrategy
    dim: str = ""
    seconds: float | None = None
    beyond_share: float | None = None
    wire_bytes: int | None = None
    excluded: str | None = None


@dataclass(frozen=True, kw_only=True)
class MixerShapePlan(MixerPlan):
    """The decision for a mixer of a shape; print it for a table of candidates.

    As in any MixerPlan, `seconds` are those beyond an even share of the work, by which
    strategies are compared. candidates: best first, those that are out last.
    """

    shape: MixerShape
    ranks: int
    direction: Direction
    work: KernelWork
    profile: HardwareProfile
    candidates: tuple[MixerCandidate, ...]

    @property
    def hardware(self) -> str:
        """Name of the hardware profile."""
        return self.profile.name

    @property
    def chosen(self) -> MixerCandidate:
        """The candidate that was chosen."""
        return next(c for c in self.candidates if c.strategy is self.strategy)

    @property
    def work_text(self) -> str:
        """What kernels are taken to do, in words."""
        return _WORK_IN_WORDS[self.work]

    def runner_up_text(self) -> str:
        """Return "exchange +53 %", of the seconds of the whole call."""
        other, best = self.runner_up, self.chosen.seconds
        if other is None or not best:
            return "none"
        (seconds,) = (c.seconds for c in self.candidates if c.strategy is other[0])
        assert seconds is not None, "what is possible has seconds"
        gap = seconds / best - 1
        tie = " (tie)" if abs(gap) <= TIE_FRACTION else ""
        return f"{other[0].value} {100 * gap:+.0f} %{tie}"

    def decision_text(self, layers: int = 0) -> str:
        """Write ranks, choice, time per layer and over `layers`, and the runner-up."""
        seconds = self.chosen.seconds or 0.0
        total = f", {duration(layers * seconds)} over {layers} layers" if layers else ""
        along = f" along {self.dim}" if self.dim else ""
        return (
            f"{ranks_text(self.ranks)}: {self.strategy.value}{along}, "
            f"{duration(seconds)} per layer{total}; runner-up {self.runner_up_text()}"
        )

    def table(self) -> str:
        """List all candidates, the chosen one marked."""
        rows = [
            (">" if c.strategy is self.strategy else "", *_row(c))
            for c in self.candidates
        ]
        return text_table([("", *HEADER), *rows], indent="")

    def __str__(self) -> str:
        nodes = ranks_text(int(self.profile.ranks_per_node))
        return "\n".join(
            [
                shape_text(self.shape, self.direction),
                f"predicted for {self.hardware}, {nodes} per node; {self.work_text}",
                "",
                self.decision_text(),
                self.table(),
            ]
        )


_WORK_IN_WORDS = {
    KernelWork.OPERANDS: "the kernel reads its operands once",
    KernelWork.CHUNKS: "the kernel is as fast as published ones",
}
_PASSES = {Direction.BOTH: "forward and backward"}


def shape_text(shape: MixerShape, direction: Direction) -> str:
    """Describe a mixer in a few words."""
    if shape.kind is MixerKind.MAMBA:
        sizes = f"{shape.entries} channels of {shape.key_dim} states"
    else:
        sizes = (
            f"{shape.key_heads} key heads of {shape.key_dim}, "
            f"{shape.value_heads} value heads of {shape.value_dim}"
        )
    return (
        f"{shape.kind.value}: {shape.tokens} tokens, batch {shape.batch}, {sizes}, "
        f"{8 * shape.bytes_per_element} bits per element, "
        f"{_PASSES.get(direction, direction.value)}"
    )


def _row(candidate: MixerCandidate) -> tuple[str, ...]:
    share = None
    if candidate.seconds is not None and candidate.beyond_share is not None:
        share = candidate.seconds - candidate.beyond_share
    sent = candidate.wire_bytes
    return (
        candidate.strategy.value,
        candidate.dim,
        milliseconds(candidate.seconds),
        milliseconds(share),
        "" if sent is None else f"{sent / 1e6:.1f}",
        candidate.excluded or "",
    )
