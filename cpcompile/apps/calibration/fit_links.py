"""Fit latencies and rates of exchanges to their timings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cpcompile.apps.calibration.least_squares import (
    LeastSquaresFit,
    Parameter,
    Vector,
    fit,
)
from cpcompile.apps.calibration.samples import MessageSample, TimedExchange

RATE_FIELDS = {
    TimedExchange.HOP: "link_bytes_per_second",
    TimedExchange.ALL_GATHER: "collective_bytes_per_second",
    TimedExchange.REDUCE_SCATTER: "reduce_scatter_bytes_per_second",
    TimedExchange.ALL_TO_ALL: "all_to_all_bytes_per_second",
}
COLLECTIVES = (
    TimedExchange.ALL_GATHER,
    TimedExchange.REDUCE_SCATTER,
    TimedExchange.ALL_TO_ALL,
)

# Groups whose all-to-alls differ by less share nothing.
_ALIKE = 0.7


def fit_hops(samples: Sequence[MessageSample]) -> LeastSquaresFit:
    """Fit link_latency_seconds and link_bytes_per_second to messages around a ring."""
    sizes = np.array([s.sent_bytes for s in samples])

    def predict(values: Mapping[str, float]) -> Vector:
        seconds: Vector = values["link_latency_seconds"] + (
            sizes / values["link_bytes_per_second"]
        )
        return seconds

    return fit(
        [
            _latency("link_latency_seconds", samples),
            _rate("link_bytes_per_second", samples),
        ],
        predict,
        [s.seconds for s in samples],
        scales=(1.0,),
    )


def fit_collectives(samples: Sequence[MessageSample]) -> LeastSquaresFit:
    """Fit one latency for all collectives, and a rate for each.

    With groups of several sizes also collective_latency_per_rank_seconds.
    """
    sizes = np.array([s.sent_bytes for s in samples])
    more_ranks = np.array([s.ranks - 2 for s in samples])
    which = {kind: np.array([s.kind is kind for s in samples]) for kind in COLLECTIVES}
    parameters = [_latency("collective_latency_seconds", samples)]
    several = len({s.ranks for s in samples}) > 1
    if several:
        name = "collective_latency_per_rank_seconds"
        parameters.append(_latency(name, samples))
    for kind in COLLECTIVES:
        if which[kind].any():
            of_kind = [s for s in samples if s.kind is kind]
            parameters.append(_rate(RATE_FIELDS[kind], of_kind))

    def predict(values: Mapping[str, float]) -> Vector:
        seconds: Vector = np.full(len(sizes), values["collective_latency_seconds"])
        if several:
            seconds += more_ranks * values["collective_latency_per_rank_seconds"]
        for kind, mine in which.items():
            if mine.any():
                seconds += mine * sizes / values[RATE_FIELDS[kind]]
        return seconds

    return fit(parameters, predict, [s.seconds for s in samples], scales=(1.0,))


def shared_bridge(samples: Sequence[MessageSample]) -> tuple[int, float]:
    """Find ranks_per_bridge and bridge_bytes_per_second from grouped all-to-alls.

    Groups of 2, 4, ... consecutive ranks that all exchange at once get the same rate
    each, until a group has more ranks than a host bridge: these then share the bridge.

    Returns: (0, 0) if no ranks share one, or if there is only one size of groups.
    """
    largest: dict[int, MessageSample] = {}
    for sample in sorted(samples, key=lambda s: s.sent_bytes / max(1, s.ranks - 1)):
        if sample.kind is TimedExchange.ALL_TO_ALL:
            largest[sample.ranks] = sample
    rates = {n: largest[n].sent_bytes / largest[n].seconds for n in sorted(largest)}
    per_bridge, size = min(rates, default=0), max(rates, default=0)
    for ranks, rate in rates.items():
        if rate < _ALIKE * max(rates.values()):
            # Of size - 1 messages of a rank, size - per_bridge pass the bridge.
            share = (size - per_bridge) / (size - 1)
            return per_bridge, rates[size] * per_bridge * share
        per_bridge = ranks
    return 0, 0.0


def _latency(name: str, samples: Sequence[MessageSample]) -> Parameter:
    shortest = min(s.seconds for s in samples)
    longest_small = max(s.seconds for s in samples)
    return Parameter(name, shortest / 2, shortest * 1e-3, longest_small)


def _rate(name: str, samples: Sequence[MessageSample]) -> Parameter:
    largest = max(samples, key=lambda s: s.sent_bytes)
    start = largest.sent_bytes / largest.seconds
    return Parameter(name, start, start / 100, start * 100)
