"""Derive how far a result may be from the exact one, from what one process reaches.

Note [Derived bounds]
The exact result is computed in one process in float64. The rough one is what one
process makes in the dtype of the result, on the processor of the run. A result that
sums the same numbers in another order has an error of the size of the rough one's:

    error <= TIMES (error of the rough one + eps of its dtype * scale)

Errors are the largest absolute ones of a tensor. The scale is the largest exact value,
or a floor where that is larger: a value that is small because large ones cancel, as a
loss near zero, or the gradient of a key's bias, has the errors of those. No number here
depends on a processor.

The error of the rough one is a single sample: of a loss, or of a tensor of a few
numbers, it may be zero by chance. Where many tensors of one kind are compared, each
counts with at least the median of their errors, as shares of their scales.

A result that is computed in float64 itself has no rough one. Its sums have at most a
thousand summands, and each rounds once:

    error <= ROUNDINGS * eps of float64 * scale

Another result in float64, with other roundings, shows where they grow, as in batch
norms of two values: TIMES its distance from the exact one is added.

A fault is larger by many orders of magnitude: a token, a rank or a summand that is
missing, or counted twice, changes results in their first digits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

TIMES = 4.0
ROUNDINGS = 2.0**10  # 2.3e-13 of the scale
FLOOR = 1e-4  # of the largest gradient of a model
NOISE = 1e-12  # of the largest gradient, in float64


def bound(
    exact: Tensor,
    rough: Tensor | None = None,
    floor: float = 0.0,
    usual: float = 0.0,
) -> float:
    """Return the largest error that a tensor may have, by Note [Derived bounds].

    usual: the median of the errors of the model's rough tensors, as shares.
    """
    if not exact.numel():
        return 0.0
    scale = scale_of(exact, floor)
    if rough is None or rough.dtype == torch.float64:
        assert exact.dtype == torch.float64, f"{exact.dtype} needs a rough result"
        other = 0.0 if rough is None else error_of(whole(rough), exact)
        assert other < torch.inf, "nothing is too far from such a rough result"
        return ROUNDINGS * torch.finfo(exact.dtype).eps * scale + TIMES * other
    eps = torch.finfo(rough.dtype).eps if rough.is_floating_point() else 0.0
    own = error_of(whole(rough), exact)
    assert own < torch.inf, "nothing is too far from such a rough result"
    return TIMES * (max(own, usual * scale) + eps * scale)


def bound_where_defined(
    exact: Tensor, rough: Sequence[Tensor], floor: float, usual: float = 0.0
) -> float:
    """Return the largest bound by the rough results; NaN of `exact` does not count."""
    undefined = exact.isnan()
    defined = exact.masked_fill(undefined, 0.0)
    if not rough:
        return bound(defined)
    others = (x.masked_fill(undefined, 0.0) for x in rough)
    return max(bound(defined, x, floor, usual) for x in others)


def error_where_defined(got: Tensor, exact: Tensor) -> float:
    """Return the largest error; where both are NaN, `got` is right."""
    both = exact.isnan() & got.isnan()
    return error_of(*(x.masked_fill(both, 0.0) for x in (got, exact)))


def scale_of(exact: Tensor, floor: float) -> float:
    """Return the largest finite absolute value, or the floor if that is larger."""
    return max(largest(exact[exact.isfinite()]), floor)


def share_of_error(exact: Tensor, rough: Sequence[Tensor], floor: float) -> float:
    """Return the largest error of the rough ones over the scale; 0 without a scale."""
    scale = scale_of(exact, floor)
    defined = exact.isfinite()
    errors = [error_of(whole(x)[defined], exact[defined]) for x in rough]
    return max(errors, default=0.0) / scale if scale else 0.0


def gradient_floor(gradient: Tensor, most: float) -> float:
    """Return the least scale of a gradient of a model whose largest one is `most`.

    Gradients that are zero but for noise in float64 (of a key bias, which moves no
    softmax) are noise in any precision: their scale is the largest gradient.
    """
    return most if largest(gradient) <= NOISE * most else FLOOR * most


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the dtype of the constants that a model makes."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def whole(x: Tensor) -> Tensor:
    """Return the tensor, detached; of a DTensor the full tensor."""
    x = x.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x


def largest(x: Tensor) -> float:
    """Return the largest absolute value; 0 for a tensor without elements."""
    return x.detach().abs().max().item() if x.numel() else 0.0


def error_of(x: Tensor, exact: Tensor) -> float:
    """Return the largest absolute error of x.

    Infinities that are equal have none, others an infinite one; NaN gives NaN.
    """
    x, exact = x.double(), exact.double()
    return largest(torch.where(x == exact, 0.0, x - exact))
