"""Fit positive parameters within bounds to measured times, best in ratio.

The residual of a time is log(predicted / measured), so that microseconds count as much
as seconds, and parameters are searched for in their logarithms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Predict = Callable[[Mapping[str, float]], Vector]

_STEPS = 200
_SMALLEST_STEP = 1e-9
_DIFFERENCE = 1e-5
# A residual larger than this, 20 %, counts less than by its square: one disturbed
# timing must not bend the rest (the pseudo-Huber loss).
_OUTLIER = 0.2


@dataclass(frozen=True)
class Parameter:
    """A parameter to fit: where the search starts, and the bounds of its value."""

    name: str
    start: float
    low: float
    high: float


@dataclass(frozen=True)
class LeastSquaresFit:
    """Fitted parameters, and how far their predictions are from what was measured."""

    values: Mapping[str, float]
    errors: Vector  # |predicted / measured - 1| of every time

    @property
    def summary(self) -> str:
        """Text of the median and the worst error, as a profile records it."""
        return describe_errors(self.errors)


def describe_errors(errors: Vector) -> str:
    """Describe relative errors by their median and the worst of them."""
    median, worst = float(np.median(errors)), float(np.max(errors))
    return f"median error {median:.1%}, worst {worst:.1%} of {len(errors)} times"


def fit(
    parameters: Sequence[Parameter],
    predict: Predict,
    measured: Sequence[float],
    scales: Sequence[float] = (1.0, 0.1, 10.0),
) -> LeastSquaresFit:
    """Find the parameters of the smallest loss, by Levenberg's and Marquardt's method.

    scales: the search runs once for each, from all starting values times the scale.
    """
    times = np.asarray(measured, dtype=np.float64)
    low = np.log([p.low for p in parameters])
    high = np.log([p.high for p in parameters])
    first = np.log([p.start for p in parameters])

    def named(x: Vector) -> dict[str, float]:
        return {p.name: float(v) for p, v in zip(parameters, np.exp(x), strict=True)}

    def residuals(x: Vector) -> Vector:
        ratio: Vector = np.log(np.maximum(predict(named(x)), 1e-300) / times)
        return ratio

    solutions = [
        _search(np.clip(first + np.log(scale), low, high), residuals, low, high)
        for scale in scales
    ]
    best = min(solutions, key=lambda x: _loss(residuals(x)))
    return LeastSquaresFit(named(best), np.abs(np.expm1(residuals(best))))


def _loss(residual: Vector) -> float:
    return float(np.sum(np.sqrt(1 + (residual / _OUTLIER) ** 2) - 1))


def _search(
    x: Vector, residuals: Callable[[Vector], Vector], low: Vector, high: Vector
) -> Vector:
    """Search for a local minimum within the bounds, starting from x."""
    damping, residual = 1e-2, residuals(x)
    for _ in range(_STEPS):
        jacobian = np.stack(
            [(residuals(x + _DIFFERENCE * unit) - residual) for unit in np.eye(len(x))],
            axis=1,
        )
        jacobian /= _DIFFERENCE
        weight = 1 / np.sqrt(1 + (residual / _OUTLIER) ** 2)
        gradient = jacobian.T @ (weight * residual)
        # What a bound holds back stays where it is.
        free = ~(((x <= low) & (gradient > 0)) | ((x >= high) & (gradient < 0)))
        if not free.any():
            break
        active = jacobian[:, free]
        curvature = active.T @ (weight[:, None] * active)
        scale = np.diag(np.maximum(np.diag(curvature), 1e-12))
        step = np.zeros_like(x)
        step[free] = -np.linalg.solve(curvature + damping * scale, gradient[free])
        moved = np.clip(x + np.clip(step, -2.0, 2.0), low, high)
        new = residuals(moved)
        if _loss(new) < _loss(residual):
            change = float(np.max(np.abs(moved - x)))
            x, residual, damping = moved, new, max(damping / 5, 1e-9)
            if change < _SMALLEST_STEP:
                break
        else:
            damping *= 5
            if damping > 1e9:
                break
    return x
