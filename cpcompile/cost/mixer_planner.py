"""Choose how ranks share the mixers of a model of known sizes, for `cpcompile plan`.

It prices the shape of a call as `exchange_mixers` prices the call in a graph.
"""

from __future__ import annotations

import math
from dataclasses import replace

from cpcompile.cost.hardware.profile import HardwareProfile
from cpcompile.cost.mixer_plan import MixerPlan, MixerStrategy
from cpcompile.cost.mixer_prices import WORK_OF_A_STEP, MixerPrices, Summary
from cpcompile.cost.mixer_shapes import MixerKind, MixerShape, TokenValue
from cpcompile.cost.plans import Direction
from cpcompile.geometry.layout import leaves_ranks_empty

_HEADS, _BATCH, _CHANNELS = "heads", "batch", "value channels"
_RUNS = {Direction.FORWARD: 1, Direction.BACKWARD: WORK_OF_A_STEP - 1}


def plan_mixers(
    shape: MixerShape,
    profile: HardwareProfile,
    ranks: int,
    direction: Direction,
    model: str = "",
    calls: int = 1,
) -> MixerPlan:
    """Compare the strategies for `calls` mixers of one shape in a model, and choose.

    `seconds` of the plan are those of a call on the slowest rank, beyond an even share
    of the work of one device.
    """
    is_both = direction is Direction.BOTH
    prices = MixerPrices.of_training(profile, ranks, is_both)
    if not is_both:
        prices = replace(prices, runs=_RUNS[direction])
    summary, exchanges = None, dict[str, float]()
    if shape.state is not None and not leaves_ranks_empty(shape.tokens, ranks):
        summary = Summary.of_state(*shape.state)
    for dim in _exchanged_dims(shape, ranks):
        exchanges[dim] = _exchange_seconds(shape, prices, dim)
    work = prices.runs * shape.forward_seconds(profile)
    operands = map(shape.nbytes, shape.operands)
    ways = prices.ways(work, operands, summary, exchanges.values())
    if ranks == 1:
        ways = {MixerStrategy.GATHER: 0.0}
    seconds = sorted(ways.items(), key=lambda x: (x[1], x[0].value))
    strategy, _ = seconds[0]
    is_exchange = strategy is MixerStrategy.EXCHANGE
    return MixerPlan(
        path=model,
        name=shape.kind.value,
        strategy=strategy,
        seconds=tuple(seconds),
        dim=min(exchanges, key=lambda dim: exchanges[dim]) if is_exchange else "",
        calls=calls,
    )


def _exchanged_dims(shape: MixerShape, ranks: int) -> list[str]:
    """Return the dimensions that ranks can have parts of.

    Channels of values only where neither heads nor rows are dealt out evenly: every
    rank reads what is not of values, and computes again what is made of that alone.
    """
    counts = {x.heads for x in (*shape.operands, shape.result)} - {1}
    is_uneven = len(counts) > 1 and any(n % ranks for n in counts)
    entries = {_HEADS: shape.entries, _BATCH: shape.batch}
    dims = [dim for dim in entries if not leaves_ranks_empty(entries[dim], ranks)]
    if is_uneven and _HEADS in dims:
        dims.remove(_HEADS)
    if shape.kind is MixerKind.MAMBA or any(entries[x] % ranks == 0 for x in dims):
        return dims
    return dims + [_CHANNELS] * (not leaves_ranks_empty(shape.value_dim, ranks))


def _exchange_seconds(shape: MixerShape, prices: MixerPrices, dim: str) -> float:
    """Return the seconds of an exchange along a dimension, beyond an even share."""
    entries = {_HEADS: shape.entries, _BATCH: shape.batch, _CHANNELS: shape.value_dim}
    most = -(-entries[dim] // prices.ranks)

    def is_read_by_all(value: TokenValue) -> bool:
        if dim == _CHANNELS:
            return not value.has_channels
        return dim == _HEADS and value.heads == 1 < shape.entries

    work = prices.runs * shape.forward_seconds(prices.profile)
    largest = work * most / entries[dim]
    if any(map(is_read_by_all, shape.operands)):
        part = replace(shape, value_dim=most)
        if dim == _HEADS:
            part = replace(shape, value_heads=most, value_dim=shape.entry_dim)
        largest = prices.runs * part.forward_seconds(prices.profile)
    sent = [
        prices.gathered([shape.nbytes(value)])
        if is_read_by_all(value)
        else prices.exchanged(shape.nbytes(value))
        for value in (*shape.operands, shape.result)
    ]
    return math.fsum([largest - work / prices.ranks, *sent])
