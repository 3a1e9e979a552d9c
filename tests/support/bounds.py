"""How far a result may be from the exact one, derived from what one process reaches.

Note [Derived bounds]
The exact result is computed in one process in float64. The rough one is what one
process makes in the dtype of the result, on the processor of the run. A result that
sums the same numbers in another order has an error of the size of the rough one's:

    error <= TIMES (error of the rough one + eps of its dtype * scale)

Errors are the largest absolute ones of a tensor. The scale is the largest exact value,
or a floor where that is larger: a value that is small because large ones cancel, as a
loss near zero, or the gradient of a key's bias, has the errors of those. No number here
depends on a processor.

A result that is computed in float64 itself has no rough one. Its sums have at most a
thousand summands, and each rounds once:

    error <= ROUNDINGS * eps of float64 * scale

A fault is larger by many orders of magnitude: a token, a rank or a summand that is
missing, or counted twice, changes results in their first digits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

TIMES = 4.0
ROUNDINGS = 2.0**10  # 2.3e-13 of the scale
OPERAND_SCALE = 4.0  # operands are normal numbers, of some thousand the largest

Values = Mapping[str, Tensor]


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


def check(deviations: Sequence[Deviation]) -> None:
    """Fail with all that is too large."""
    wrong = [x for x in deviations if not x.is_allowed]
    assert not wrong, "; ".join(map(str, wrong))


def assert_close(
    name: str,
    got: Tensor,
    exact: Tensor,
    rough: Tensor | None = None,
    floor: float = 0.0,
) -> None:
    """Fail if one tensor is too far from the exact one."""
    check([deviation(name, got, exact, rough, floor)])


def assert_equal(name: str, got: Tensor, wanted: Tensor) -> None:
    """Fail if one tensor has another dtype, or any other bit, than the wanted one."""
    assert got.dtype == wanted.dtype, f"{name} has {got.dtype}, not {wanted.dtype}"
    check([deviation(name, got, wanted, limit=0.0)])


def deviation(
    name: str,
    got: Tensor,
    exact: Tensor,
    rough: Tensor | None = None,
    floor: float = 0.0,
    limit: float | None = None,
) -> Deviation:
    """Of `got` from `exact`; the name says on which rank.

    limit: instead of Note [Derived bounds], for a test that derives its own.
    """
    got, exact = whole(got), whole(exact)
    have, need = list(got.shape), list(exact.shape)
    assert have == need, f"{name} has shape {have}, not {need}"
    name += f" on rank {dist.get_rank()}" if dist.is_initialized() else ""
    limit = bound(exact, rough, floor) if limit is None else limit
    return Deviation(name, _error(got, exact), limit)


def bound(exact: Tensor, rough: Tensor | None = None, floor: float = 0.0) -> float:
    """The largest error of a tensor, by Note [Derived bounds]."""
    if not exact.numel():
        return 0.0
    scale = max(largest(exact[exact.isfinite()]), floor)
    if rough is None or rough.dtype == torch.float64:
        assert exact.dtype == torch.float64, f"{exact.dtype} needs a rough result"
        return ROUNDINGS * torch.finfo(exact.dtype).eps * scale
    eps = torch.finfo(rough.dtype).eps if rough.is_floating_point() else 0.0
    own = _error(whole(rough), exact)
    assert own < torch.inf, "nothing is too far from such a rough result"
    return TIMES * (own + eps * scale)


def deviations(
    got: Values, exact: Values, rough: Values | None = None
) -> list[Deviation]:
    """Of all tensors: results, and gradients as "grad of ...".

    What cancels to a small loss was of order 1. What cancels to a small gradient, as
    that of queries that see one key, was as large as the largest one times an operand.
    """
    odd = got.keys() ^ exact.keys()
    assert not odd, f"{sorted(odd)} are on one side only"
    gradients = [largest(whole(x)) for n, x in exact.items() if is_gradient(n)]
    found = []
    for name, x in exact.items():
        floor = float(x.ndim == 0)
        if is_gradient(name):
            floor = OPERAND_SCALE * max(gradients)
        given = None if rough is None else rough[name]
        found.append(deviation(name, got[name], x, given, floor))
    return found


def is_gradient(name: str) -> bool:
    return name.startswith("grad of ")


def step(
    call: Callable[..., Tensor], model: nn.Module, *args: Tensor, **named: Tensor
) -> Values:
    """The loss that `call` gives, and the gradients of the model's parameters."""
    model.zero_grad()
    loss = call(*args, **named)
    return {"loss": loss.detach()} | gradients(loss, model)


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Of those parameters that have one."""
    loss.backward()
    named = model.named_parameters()
    # Not cloned: a clone of a partial DTensor would reduce it.
    return {f"grad of {n}": p.grad for n, p in named if p.grad is not None}


def in_one_process(
    run: Callable[[nn.Module], Values], model: nn.Module
) -> tuple[Values, Values]:
    """The exact and the rough values: `run` of the model in float64, and as it is.

    Gradients of the model are left as they were.
    """
    with default_dtype(torch.float64):
        exact = run(copy.deepcopy(model).double())
    return exact, run(copy.deepcopy(model))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Of the constants that a model makes."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def whole(x: Tensor) -> Tensor:
    """The full tensor of a DTensor."""
    x = x.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x


def largest(x: Tensor) -> float:
    """The largest absolute value, 0 for a tensor without elements."""
    return x.detach().abs().max().item() if x.numel() else 0.0


def _error(x: Tensor, exact: Tensor) -> float:
    """Infinities that are equal have none, others an infinite one; NaN for NaN."""
    x, exact = x.double(), exact.double()
    return largest(torch.where(x == exact, 0.0, x - exact))
