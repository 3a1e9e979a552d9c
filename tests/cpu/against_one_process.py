"""Runs a compiled module in float64 and compares it with the module in one process.

In float64 results differ by rounding only; see Note [Derived bounds] in
tests/support/bounds.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

import cpcompile as cp
from cpcompile import logs
from tests.cpu.attention_cases import sequence_mesh
from tests.support.bounds import Deviation, Values, check, deviations, whole


@dataclass(frozen=True)
class Comparison:
    """Deviations of results and gradients, and our warnings."""

    deviations: list[Deviation]
    warnings: list[str]

    def check(self) -> None:
        """Fail with all deviations that are too large."""
        check(self.deviations)


def compare(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    world: int,
    door: str = "plain",
    **options: Any,
) -> Comparison:
    """Forward and backward of make()(x), where x is sharded along dim 1.

    door: "plain" or "dtensor", how x is given.
    """
    torch._dynamo.reset()
    logs.warn_once.cache_clear()
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(shape, dtype=torch.float64)
    wanted = run(model, x.clone().requires_grad_(), model)
    mesh = sequence_mesh(world)
    options = {"inner": "aot_eager", **options}
    if door == "plain":
        given = x.clone().requires_grad_()
        options["mesh"] = mesh
    else:
        given = cp.shard(x, mesh, 1).detach().requires_grad_()
    with warnings() as texts:
        found = run(torch.compile(model, backend="cp", options=options), given, model)
    return Comparison(deviations(found, wanted), texts)


def run(call: Callable[..., Any], x: Tensor, model: nn.Module) -> Values:
    """Results, and gradients of their sum with random weights."""
    model.zero_grad()
    torch.manual_seed(5)
    results = [y for y in pytree.tree_leaves(call(x)) if isinstance(y, Tensor)]
    generator = torch.Generator().manual_seed(3)
    losses = [
        (y * _like(y, torch.randn(y.shape, generator=generator, dtype=y.dtype))).sum()
        for y in results
        if y.requires_grad
    ]
    loss = sum(losses[1:], losses[0])
    (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward()
    found = {f"result {n}": y for n, y in enumerate(results)}
    for name, p in {"x": x, **dict(model.named_parameters())}.items():
        found[f"grad of {name}"] = torch.zeros_like(p) if p.grad is None else p.grad
    return {name: whole(y).clone() for name, y in found.items()}


@contextmanager
def warnings() -> Iterator[list[str]]:
    """The texts of our own warnings, in order."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("cpcompile").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("cpcompile").removeHandler(handler)


def _like(y: Tensor, weight: Tensor) -> Tensor:
    if not isinstance(y, DTensor):
        return weight
    everywhere = [Replicate()] * y.device_mesh.ndim
    return DTensor.from_local(weight, y.device_mesh, everywhere, run_check=False)
