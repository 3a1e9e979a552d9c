"""Fit the rates of attention, copies and sums to their timings.

The attention fit inverts `kernel_seconds` of the cost model itself, so what it finds is
what the model will use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import sympy  # type: ignore[import-untyped]  # sympy ships no type information

from cpcompile.apps.calibration.least_squares import (
    LeastSquaresFit,
    Parameter,
    Vector,
    fit,
)
from cpcompile.apps.calibration.samples import KernelSample, OverlapSample, SizedSample
from cpcompile.cost import symbols
from cpcompile.cost.compute import kernel_seconds

# Nothing computes faster than this, or slower: bounds that any device keeps.
_SLOWEST_FLOPS, _FASTEST_FLOPS = 1e7, 1e16
_SMALL = 1e-3  # what is found to be about this small is written as 0
_PARAMETERS = {
    "forward_flops_per_second": symbols.F_fwd,
    "causal_forward_flops_per_second": symbols.F_fwd_causal,
    "backward_flops_per_second": symbols.F_bwd,
    "causal_backward_flops_per_second": symbols.F_bwd_causal,
    "softmax_head_dims": symbols.softmax,
    "forward_row_overhead_keys": symbols.row_fwd,
    "backward_row_overhead_keys": symbols.row_bwd,
    "tile_tokens": symbols.tile,
    "kernel_launch_seconds": symbols.launch,
}
_ROWS, _DENSE, _TRIANGULAR = sympy.symbols("rows dense triangular")


@dataclass(frozen=True)
class StraightLine:
    """The line `latency + size / rate`, and how well it fits."""

    latency: float
    rate: float
    fit: LeastSquaresFit


def fit_kernels(
    samples: Sequence[KernelSample], parallel_tiles: float
) -> LeastSquaresFit:
    """Fit the fields of a profile that `kernel_seconds` reads, but parallel_tiles."""
    best = {
        (backward, causal): max(
            _flops(s) / s.seconds
            for s in samples
            if (s.backward, s.causal) == (backward, causal)
        )
        for backward in (False, True)
        for causal in (False, True)
    }
    rates = [
        Parameter(name, best[key], _SLOWEST_FLOPS, _FASTEST_FLOPS)
        for name, key in zip(
            _PARAMETERS,
            [(False, False), (False, True), (True, False), (True, True)],
            strict=False,
        )
    ]
    shortest = min(s.seconds for s in samples)
    parameters = [
        *rates,
        Parameter("softmax_head_dims", 8.0, _SMALL, 512.0),
        Parameter("forward_row_overhead_keys", 16.0, _SMALL, 4096.0),
        Parameter("backward_row_overhead_keys", 16.0, _SMALL, 4096.0),
        Parameter("tile_tokens", 128.0, _SMALL, 4096.0),
        Parameter("kernel_launch_seconds", shortest / 2, shortest * 1e-3, shortest),
    ]
    columns = [
        np.array([getattr(s, name) for s in samples], dtype=np.float64)
        for name in ("batch", "heads", "head_dim", "rows", "pairs")
    ]
    causal = np.array([s.causal for s in samples])
    backward = np.array([s.backward for s in samples])

    def predict(values: Mapping[str, float]) -> Vector:
        batch, heads, dim, rows, pairs = columns
        dense, triangular = np.where(causal, 0, pairs), np.where(causal, pairs, 0)
        rest = (batch, heads, dim, rows, dense, triangular, parallel_tiles)
        times = [
            _kernel(b)(*rest, *map(values.get, _PARAMETERS)) for b in (False, True)
        ]
        chosen: Vector = np.where(backward, times[1], times[0])
        return chosen

    fitted = fit(parameters, predict, [s.seconds for s in samples])
    values = {k: v if v > 2 * _SMALL else 0.0 for k, v in fitted.values.items()}
    values["kernel_launch_seconds"] = fitted.values["kernel_launch_seconds"]
    return replace(fitted, values=values)


def host_bound_seconds(samples: Sequence[KernelSample]) -> float:
    """Return the longest time among the steps of the fewest (query, key) pairs.

    On a device, it is what the host takes to issue a step.
    """
    fewest = min(s.pairs for s in samples)
    return max(s.seconds for s in samples if s.pairs == fewest)


def fit_line(samples: Sequence[SizedSample]) -> StraightLine:
    """Fit a latency and a rate; leave out disturbed times, which are not positive."""
    good = [s for s in samples if s.seconds > 0]
    largest = max(good, key=lambda s: s.size)
    shortest = min(s.seconds for s in good)
    start = largest.size / largest.seconds
    sizes = np.array([s.size for s in good])
    parameters = [
        Parameter("latency", shortest / 2, shortest * 1e-4, shortest * 2),
        Parameter("rate", start, start / 1e3, start * 1e3),
    ]
    fitted = fit(
        parameters,
        lambda values: values["latency"] + sizes / values["rate"],
        [s.seconds for s in good],
        scales=(1.0,),
    )
    return StraightLine(fitted.values["latency"], fitted.values["rate"], fitted)


def fit_overlap(samples: Sequence[OverlapSample]) -> float:
    """Return the part of a transfer beside a computation that costs no time, 0 to 1.

    Samples are weighted by what there was to save, against the time of both at once.
    """
    weights = [min(s.transfer, s.computation) / s.together for s in samples]
    saved = [(s.transfer + s.computation) / s.together - 1 for s in samples]
    top = sum(w * s for w, s in zip(weights, saved, strict=True))
    return min(1.0, max(0.0, top / sum(w * w for w in weights)))


def _flops(sample: KernelSample) -> float:
    """Return the flops of the mask's pairs, as HardwareProfile counts them."""
    products = 10 if sample.backward else 4
    heads = sample.batch * sample.heads
    return products * heads * sample.head_dim * sample.pairs


@cache
def _kernel(backward: bool) -> Any:
    """Make a function of arrays from the formula `kernel_seconds`."""
    expression = kernel_seconds(_ROWS, _DENSE, _TRIANGULAR, backward)
    expression = expression.subs({symbols.live: 1, symbols.E: symbols.D})
    arguments = (symbols.B, symbols.h, symbols.D, _ROWS, _DENSE, _TRIANGULAR)
    arguments = (*arguments, symbols.slots, *_PARAMETERS.values())
    return sympy.lambdify(arguments, expression, "numpy", cse=True)
