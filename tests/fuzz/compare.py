"""How far values may be from those of one process, and how far they are.

In float64. An error is relative to the largest value of a tensor; for a gradient to
not less than FLOOR of the largest gradient, because those that are zero but for noise
(of a key bias, which moves no softmax) have no digits of their own. And of anything
to not less than TINY, because parameters and inputs are about 1: where those cancel, as
in the mean of a normalised row, all gradients may be zero but for noise, about 1e-16.

Two correct programs differ by the order of their sums. Each step rounds with 2**-53,
about 1e-16, and what follows may amplify that: a norm divides by a small deviation. So
the bound is as far as the values of one process move when every parameter and float
input moves by 2**-40 (1e-12) of itself, four decades more than a rounding; but not
less than LEAST, ROUNDED roundings of a value of 1 in one that cancels down to TINY,
and not more than MOST. A fault of ours is large beside both: a token, a rank or a
summand of a gradient that is missing, or counted twice, changes a mean over at most
3 x 100 tokens by 1e-3 or more.

In float32 the reference is one process in float64, and the bound is that of
Note [Derived bounds] in tests/support/bounds.py, of one process in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cpcompile.apps.verification.bounds import error_where_defined, scale_of
from tests.support.bounds import TIMES, Deviation

FLOOR = 1e-4  # of the largest gradient
TINY = 1e-4
ROUNDED = 32
LEAST = ROUNDED * torch.finfo(torch.float64).eps / TINY  # 7e-11
MOST = 1e-6  # a thousandth of the least fault
MOVE = 2.0**-40

Values = dict[str, Tensor]


def distances(got: Values, exact: Values) -> dict[str, float]:
    """The error of each tensor; infinite if it is missing or has another shape.

    A gradient of zeros may be missing: where a parameter changes a result that the loss
    does not depend on, AOTAutograd gives zeros and eager gives None.
    """
    grads = [x for name, x in exact.items() if name.startswith("grad ")]
    largest = max((scale_of(x.double(), 0.0) for x in grads), default=0.0)
    errors = {}
    for name in got.keys() ^ exact.keys():
        value = got[name] if name in got else exact[name]
        zero = name.startswith("grad ") and not value.any()
        errors[name] = 0.0 if zero else float("inf")
    for name in got.keys() & exact.keys():
        floor = FLOOR * largest if name.startswith("grad ") else 0.0
        errors[name] = _distance(got[name], exact[name], floor)
    return errors


def beyond(errors: dict[str, float], moved: dict[str, float], dtype: str) -> list[str]:
    """What is out of bounds, the worst first; `moved`: what one process moves by."""
    found = [
        Deviation(name, error, _bound(moved.get(name, 0.0), dtype))
        for name, error in errors.items()
    ]
    wrong = [x for x in found if not x.is_allowed]
    return [str(x) for x in sorted(wrong, key=lambda x: x.error, reverse=True)]


def _bound(moved: float, dtype: str) -> float:
    if dtype == "float64":
        return min(max(LEAST, moved), MOST)
    # What one process has no number for, allows nothing.
    rough = moved if math.isfinite(moved) else 0.0
    return TIMES * (rough + torch.finfo(getattr(torch, dtype)).eps)


def _distance(got: Tensor, exact: Tensor, floor: float) -> float:
    if got.shape != exact.shape:
        return float("inf")
    exact = exact.double()
    return error_where_defined(got, exact) / max(scale_of(exact, floor), TINY)
