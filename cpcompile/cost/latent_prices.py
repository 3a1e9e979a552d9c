"""What it costs to gather something narrower than keys, and to compute keys of it.

The formulas of latents.py are linear in what a cut through the computation of the keys
decides: how many values are gathered, their bytes, and the work that comes after them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from cpcompile.cost.evaluate import evaluator
from cpcompile.cost.hardware.profile import HardwareProfile
from cpcompile.cost.latents import made_backward_seconds, made_forward_seconds
from cpcompile.cost.plans import Direction, Latents, Workload
from cpcompile.cost.symbols import SYMBOLS, numbers
from cpcompile.geometry.degrees import CPDegrees


@dataclass(frozen=True)
class LatentPrices:
    """Seconds of a call per value that is gathered, and per byte of it and token.

    Those to compute keys are per operation and per byte moved, of a token.
    """

    value: float
    byte: float
    flop: float
    moved: float


@cache
def latent_prices(workload: Workload, profile: HardwareProfile) -> LatentPrices:
    """Return the prices of a call on the slowest rank, in the workload's direction."""
    units = Latents(1, 0, 0, 0), Latents(0, 1, 0, 0), Latents(0, 0, 1, 0)
    seconds = [_seconds(workload, profile, x) for x in (*units, Latents(0, 0, 0, 1))]
    return LatentPrices(*seconds)


def _seconds(workload: Workload, profile: HardwareProfile, latents: Latents) -> float:
    own = replace(workload, latents=latents)
    values = numbers(own, CPDegrees(1, workload.ranks), profile)
    forward, backward = _compiled()(*(values[symbol] for symbol in SYMBOLS))
    sums = {
        Direction.FORWARD: forward,
        Direction.BACKWARD: backward,
        Direction.BOTH: forward + backward,
    }
    return sums[workload.direction]


@cache
def _compiled() -> Callable[..., list[float]]:
    return evaluator(SYMBOLS, (made_forward_seconds(), made_backward_seconds()))
