"""Checks by the bounds of cpcompile.apps.verification.bounds, Note [Derived bounds]."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from cpcompile.apps.verification.bounds import (
    ROUNDINGS,
    TIMES,
    bound,
    bound_where_defined,
    default_dtype,
    error_of,
    error_where_defined,
    largest,
    whole,
)

__all__ = [
    "OPERAND_SCALE", "ROUNDINGS", "TIMES", "Deviation", "Values", "assert_close",
    "assert_equal", "bound", "check", "default_dtype", "deviation",
    "deviation_where_defined", "deviations", "gradients", "in_one_process",
    "is_gradient", "largest", "step", "whole",
]  # fmt: skip

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
        """Tell whether the error is within the bound."""
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
    name += f" on rank {dist.get_rank()}" if dist.is_initialized() else ""
    got, exact = whole(got), whole(exact)
    have, need = list(got.shape), list(exact.shape)
    assert have == need, f"{name} has shape {have}, not {need}"
    limit = bound(exact, rough, floor) if limit is None else limit
    return Deviation(name, error_of(got, exact), limit)


def deviation_where_defined(
    name: str, got: Tensor, exact: Tensor, rough: Sequence[Tensor], floor: float
) -> Deviation:
    """By the largest bound of the rough results; where both are NaN, `got` is right."""
    limit = bound_where_defined(exact, rough, floor)
    return Deviation(name, error_where_defined(got, exact), limit)


def in_one_process(
    run: Callable[[nn.Module], Values], model: nn.Module
) -> tuple[Values, Values]:
    """Run the model in float64 and as it is; return the exact and the rough values.

    Gradients of the model are left as they were.
    """
    with default_dtype(torch.float64):
        exact = run(copy.deepcopy(model).double())
    return exact, run(copy.deepcopy(model))


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
