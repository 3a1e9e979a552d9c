"""How far a result may be from the exact one, derived from what one process reaches.

Note [Derived bounds]
The exact result is computed in one process in float64. The rough one is what one
process makes in the dtype of the result, on the processor of the run. A result that
sums the same numbers in another order has an error of the size of the rough one's:

    error <= TIMES (error of the rough one + eps of its dtype * scale)

Errors are the largest absolute ones of a tensor. The scale is the largest exact value,
or a floor where that is larger: a value that is small because large ones cancel, as a
loss near zero, has the errors of those. No number here depends on a processor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TIMES = 4.0


@dataclass(frozen=True)
class Deviation:
    """The error of one tensor, and how large it may be."""

    name: str
    error: float
    bound: float

    @property
    def is_allowed(self) -> bool:
        return self.error <= self.bound  # False for NaN

    def __str__(self) -> str:
        return f"{self.name}: error {self.error:.3g}, allowed {self.bound:.3g}"


def deviation(
    name: str,
    got: Tensor,
    exact: Tensor,
    rough: Tensor,
    floor: float = 0.0,
    times: float = TIMES,
) -> Deviation:
    """Of `got` from `exact`, by Note [Derived bounds]."""
    assert got.shape == exact.shape == rough.shape, f"{name}: {got.shape}"
    if not got.numel():
        return Deviation(name, 0.0, 0.0)
    eps = torch.finfo(rough.dtype).eps if rough.is_floating_point() else 0.0
    scale = max(largest(exact[exact.isfinite()]), floor)
    own, error = _error(rough, exact), _error(got, exact)
    return Deviation(name, error, times * (own + eps * scale))


def _error(x: Tensor, exact: Tensor) -> float:
    """Infinities that are equal have none, others an infinite one; NaN for NaN."""
    x, exact = x.detach().double(), exact.detach().double()
    return largest(torch.where(x == exact, 0.0, x - exact))


def largest(x: Tensor) -> float:
    """The largest absolute value."""
    return x.detach().abs().max().item() if x.numel() else 0.0


def check(deviations: list[Deviation]) -> None:
    """Fail with all that is too large."""
    wrong = [x for x in deviations if not x.is_allowed]
    assert not wrong, "; ".join(map(str, wrong))
