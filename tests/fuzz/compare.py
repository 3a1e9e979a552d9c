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
less than LEAST, six decades over a rounding, and not more than MOST. A fault of ours
is large beside both: a token, a rank or a summand of a gradient that is missing, or
counted twice, changes a mean over at most 3 x 100 tokens by 1e-3 or more.

In float32 the reference is one process in float64, and the bound is LEAST_32, or four
times the error of one process in float32 if that is more: each rounds independently,
in another order, and the largest of a tensor's errors varies by less than that.
"""

from __future__ import annotations

from torch import Tensor

FLOOR = 1e-4  # of the largest gradient
TINY = 1e-4
LEAST, MOST = 1e-10, 1e-6
LEAST_32 = 1e-5
MOVE = 2.0**-40

Values = dict[str, Tensor]


def distances(got: Values, exact: Values) -> dict[str, float]:
    """The error of each tensor; infinite if it is missing or has another shape.

    A gradient of zeros may be missing: where a parameter changes a result that the loss
    does not depend on, AOTAutograd gives zeros and eager gives None.
    """
    sizes = [_size(x) for name, x in exact.items() if name.startswith("grad ")]
    largest = max(sizes, default=0.0)
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
    wrong = []
    for name, error in errors.items():
        if dtype == "float64":
            bound = min(max(LEAST, moved.get(name, 0.0)), MOST)
        else:
            bound = max(LEAST_32, 4 * moved.get(name, 0.0))
        if not error <= bound:  # NaN is out of bounds
            wrong.append((error, f"{name}: {error:.1e}, bound {bound:.1e}"))
    return [text for _, text in sorted(wrong, reverse=True)]


def _size(x: Tensor) -> float:
    finite = x.double().abs()[x.isfinite()]
    return finite.max().item() if finite.numel() else 0.0


def _distance(got: Tensor, exact: Tensor, floor: float) -> float:
    if got.shape != exact.shape:
        return float("inf")
    if not exact.numel():
        return 0.0
    difference = (got.double() - exact.double()).abs()
    difference[got.isnan() & exact.isnan()] = 0.0
    difference[got == exact] = 0.0  # infinities
    largest = difference.max().item()
    return largest / max(_size(exact), floor, TINY)
