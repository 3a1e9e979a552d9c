"""Choose how ranks share the mixers of a model of known sizes, for `cpcompile plan`.

It prices the shape of a call as `exchange_mixers` prices the call in a graph.
"""

from __future__ import annotations

import math
from dataclasses import replace

from cpcompile.cost import mixer_prices
from cpcompile.cost.hardware.profile import HardwareProfile
from cpcompile.cost.mixer_plan import MixerPlan, MixerStrategy
from cpcompile.cost.mixer_shapes import MixerKind, MixerShape, TokenValue
from cpcompile.cost.plans import Direction
from cpcompile.geometry.layout import leaves_ranks_empty

_HEADS, _BATCH, _CHANNELS = "heads", "batch", "value channels"
_STEP = mixer_prices.WORK_OF_A_STEP
_RUNS = {Direction.FORWARD: 1, Direction.BACKWARD: _STEP - 1, Direction.BOTH: _STEP}


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
    runs = _RUNS[direction]
    passes = mixer_prices.passes_of(direction is Direction.BOTH)
    work = runs * shape.forward_seconds(profile)
    sizes = map(shape.nbytes, shape.operands)
    gathered = mixer_prices.gathered_seconds(profile, ranks, sizes, passes)
    prices = {
        MixerStrategy.GATHER: mixer_prices.repeated_seconds(work, ranks) + gathered
    }
    if shape.state is not None and not leaves_ranks_empty(shape.tokens, ranks):
        prices[MixerStrategy.STATES] = mixer_prices.states_seconds(
            profile, ranks, mixer_prices.summary_of(*shape.state), work, passes
        )
    exchanges = {
        dim: _exchange_seconds(shape, profile, ranks, dim, runs, passes)
        for dim in _exchanged_dims(shape, ranks)
    }
    if exchanges:
        prices[MixerStrategy.EXCHANGE] = min(exchanges.values())
    if ranks == 1:
        prices = {MixerStrategy.GATHER: 0.0}
    seconds = sorted(prices.items(), key=lambda x: (x[1], x[0].value))
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


def _exchange_seconds(
    shape: MixerShape,
    profile: HardwareProfile,
    ranks: int,
    dim: str,
    runs: int,
    passes: int,
) -> float:
    """Return the seconds of an exchange along a dimension, beyond an even share."""
    entries = {_HEADS: shape.entries, _BATCH: shape.batch, _CHANNELS: shape.value_dim}
    most = -(-entries[dim] // ranks)

    def is_read_by_all(value: TokenValue) -> bool:
        if dim == _CHANNELS:
            return not value.has_channels
        return dim == _HEADS and value.heads == 1 < shape.entries

    work = runs * shape.forward_seconds(profile)
    largest = work * most / entries[dim]
    if any(map(is_read_by_all, shape.operands)):
        part = replace(shape, value_dim=most)
        if dim == _HEADS:
            part = replace(shape, value_heads=most, value_dim=shape.entry_dim)
        largest = runs * part.forward_seconds(profile)
    sent = [
        mixer_prices.gathered_seconds(profile, ranks, [shape.nbytes(value)], passes)
        if is_read_by_all(value)
        else mixer_prices.exchanged_seconds(profile, ranks, shape.nbytes(value), passes)
        for value in (*shape.operands, shape.result)
    ]
    return math.fsum([largest - work / ranks, *sent])
