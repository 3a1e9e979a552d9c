"""Checks by the bounds of cpcompile.apps.verification.bounds, Note [Derived bounds]."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from cpcompile.apps.verification import bounds
from cpcompile.apps.verification.bounds import (
    ROUNDINGS,
    TIMES,
    Deviation,
    Values,
    bound,
    default_dtype,
    in_one_process,
    largest,
    whole,
)

__all__ = [
    "OPERAND_SCALE",
    "ROUNDINGS",
    "TIMES",
    "Deviation",
    "Values",
    "assert_close",
    "assert_equal",
    "bound",
    "check",
    "default_dtype",
    "deviation",
    "deviations",
    "gradients",
    "in_one_process",
    "is_gradient",
    "largest",
    "step",
    "whole",
]

OPERAND_SCALE = 4.0  # operands are normal numbers, of some thousand the largest


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
    return bounds.deviation(name, got, exact, rough, floor, limit)


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
