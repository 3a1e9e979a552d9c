"""The ways in which ranks can share a mixer, and what was chosen for one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class MixerStrategy(Enum):
    """The way in which ranks share a call that mixes tokens and is no attention.

    EXCHANGE: all tokens of a part of another dimension, by all-to-all.
    STATES: the rank's own tokens, from the state that earlier ranks leave.
    GATHER: all of it on every rank.
    """

    EXCHANGE = "exchange"
    STATES = "states"
    GATHER = "gather"


@dataclass(frozen=True)
class MixerPlan:
    """What was chosen for calls of a mixer.

    path: the module that calls it. name: of the function, or of the first call of a
        region. dim: the dimension that is exchanged, where it has a name.
    seconds: predicted, by strategy, for the strategies that are possible.
    """

    path: str
    name: str
    strategy: MixerStrategy
    seconds: tuple[tuple[MixerStrategy, float], ...]
    dim: str = ""
    calls: int = 1
    forced: bool = False

    @property
    def runner_up(self) -> tuple[MixerStrategy, float] | None:
        """The best of the others, if there is one."""
        others = [x for x in self.seconds if x[0] is not self.strategy]
        return min(others, key=lambda x: x[1], default=None)

    def __str__(self) -> str:
        """Return one line for people."""
        calls = f" ({self.calls} calls)" if self.calls > 1 else ""
        along = f" along {self.dim}" if self.dim else ""
        prices = dict(self.seconds)
        own = prices.get(self.strategy)
        price = "" if own is None else f", {own * 1e3:.3g} ms"
        other = self.runner_up
        next_best = ""
        if other is not None:
            next_best = f"; runner-up {other[0].value}, {other[1] * 1e3:.3g} ms"
            if own is not None and other[1] < own and not self.forced:
                next_best += " by itself, more with the calls around it"
        forced = " (forced)" if self.forced else ""
        return (
            f"mixer {self.name}{calls} at {self.path}: {self.strategy.value}{along}"
            f"{forced}{price}{next_best}"
        )
