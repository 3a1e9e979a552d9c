"""What keys that are made of gathered latents cost, by how they are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from cpcompile.cost.evaluate import evaluator
from cpcompile.cost.hardware.profile import HardwareProfile
from cpcompile.cost.model import made_seconds
from cpcompile.cost.plans import Direction, Latents, Workload
from cpcompile.cost.symbols import SYMBOLS, numbers
from cpcompile.geometry.degrees import CPDegrees


@dataclass(frozen=True)
class LatentPrices:
    """Seconds of a call per value that is gathered, and per byte of it and token.

    The formulas are linear in what a cut through the computation of the keys decides:
    how many values are gathered, their bytes, and the work that comes after them. Those
    to compute keys are per operation and per byte moved, of a token.
    """

    value: float
    byte: float
    flop: float
    moved: float


@cache
def latent_prices(workload: Workload, profile: HardwareProfile) -> LatentPrices:
    """Return the prices of a call on the slowest rank, in the workload's direction."""
    prices = []
    for place in range(4):
        unit = Latents(*(int(i == place) for i in range(4)))
        own = replace(workload, latents=unit)
        values = numbers(own, CPDegrees(1, workload.ranks), profile)
        forward, backward = _compiled()(*(values[symbol] for symbol in SYMBOLS))
        sums = {Direction.FORWARD: forward, Direction.BACKWARD: backward}
        prices.append(sums.get(workload.direction, forward + backward))
    return LatentPrices(*prices)


@cache
def _compiled() -> Callable[..., list[float]]:
    return evaluator(SYMBOLS, (made_seconds(False), made_seconds(True)))
