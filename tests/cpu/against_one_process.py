"""Runs a compiled module in float64 and compares it with the module in one process.

In float64 results differ by rounding only; see Note [Derived bounds] in
tests/support/bounds.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import cpcompile as cp
from cpcompile import logs
from cpcompile.accounting.graph_account import Exchange
from cpcompile.reporting.graph_report import GraphReport, recording
from tests.cpu.attention_cases import sequence_mesh
from tests.support.bounds import (
    Deviation,
    Values,
    check,
    default_dtype,
    deviations,
    whole,
)


@dataclass(frozen=True)
class Comparison:
    """Deviations of results and gradients, our warnings, and a report of each graph."""

    deviations: list[Deviation]
    warnings: list[str]
    reports: list[GraphReport] = field(default_factory=list)

    def check(self) -> None:
        """Fail with all deviations that are too large."""
        check(self.deviations)

    @property
    def rewritten(self) -> list[bool]:
        """Which attention calls are context parallel."""
        return [c.plan is not None for report in self.reports for c in report.calls]

    @property
    def exchanges(self) -> list[Exchange]:
        """What is listed of all graphs, forward and backward."""
        accounts = [account for report in self.reports for account in report.accounts]
        return [exchange for account in accounts for exchange in account.exchanges]


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
    torch.manual_seed(0)
    model = make().double()
    x = torch.randn(shape, dtype=torch.float64).requires_grad_()
    return compare_calls(model, [(x,)], world, door, **options)


def hidden_states(tokens: int, width: int) -> tuple[Tensor]:
    """The input [2, tokens, width] of a call; it wants a gradient."""
    x = torch.randn(2, tokens, width, dtype=torch.float64)
    return (x.requires_grad_(),)


def compare_calls(
    model: nn.Module,
    calls: Sequence[Sequence[Any]],
    world: int,
    door: str = "plain",
    dims: Sequence[int | None] | None = None,
    **options: Any,
) -> Comparison:
    """Forward and backward of model(*inputs), of all calls by one compiled model.

    Each begins with the same parameters and buffers, into which the model may write.
    dims: that of the tokens of each input, for DTensors; 1 unless given. options: of
    the backend, and `dynamic` and `fullgraph` of torch.compile.
    """
    torch._dynamo.reset()
    logs.warn_once.cache_clear()
    mesh = sequence_mesh(world)
    how = {k: options.pop(k) for k in ("dynamic", "fullgraph") if k in options}
    options = {"inner": "aot_eager", **options}
    if door == "plain":
        options.setdefault("mesh", mesh)
    compiled = torch.compile(model, backend="cp", options=options, **how)
    found: list[Deviation] = []
    # Constants that a model makes have its dtype.
    double = default_dtype(torch.float64)
    with double, warnings() as texts, recording() as reports:
        with unchanged(model):
            exact = [run(model, inputs, model) for inputs in calls]
        for inputs, wanted in zip(calls, exact, strict=True):
            given = list(inputs)
            for i, x in enumerate(inputs if door == "dtensor" else ()):
                dim = 1 if dims is None else dims[i]
                if isinstance(x, Tensor) and dim is not None:
                    part = cp.shard(x.detach(), mesh, dim).detach()
                    given[i] = part.requires_grad_(x.requires_grad)
            found += deviations(run(compiled, given, model), wanted)
    return Comparison(found, texts, list(reports))


class Checkpointed(nn.Module):
    """A module that is computed again in the backward, each of its layers if it has."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        for layer in getattr(self.module, "layers", [self.module]):
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Give the model back the parameters and buffers that it has now."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    plain = {n: x for n, x in tensors.items() if type(x) in (Tensor, nn.Parameter)}
    before = {name: x.detach().clone() for name, x in plain.items()}
    yield
    with torch.no_grad():
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            if name in before:
                x.copy_(before[name])


def run(
    call: Callable[..., Any], inputs: Tensor | Sequence[Any], model: nn.Module
) -> Values:
    """Results, and gradients of their sum with random weights.

    Of inputs that require gradients, and parameters; and the buffers afterwards.
    """
    model.zero_grad()
    given = [
        x.detach().clone().requires_grad_(x.requires_grad)
        if isinstance(x, Tensor)
        else x
        for x in ((inputs,) if isinstance(inputs, Tensor) else inputs)
    ]
    torch.manual_seed(5)
    results = [y for y in pytree.tree_leaves(call(*given)) if isinstance(y, Tensor)]
    generator = torch.Generator().manual_seed(3)

    def weights(y: Tensor) -> Tensor:  # the same numbers in every precision
        wide = torch.complex128 if y.is_complex() else torch.float64
        return torch.randn(y.shape, generator=generator, dtype=wide).to(y.dtype)

    losses = [(y * _like(y, weights(y))).sum() for y in results if y.requires_grad]
    if losses:
        loss = sum(losses[1:], losses[0])
        (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward()
    found = {f"result {n}": y for n, y in enumerate(results)}
    leaves = {f"input {n}": x for n, x in enumerate(given) if isinstance(x, Tensor)}
    for name, p in (leaves | dict(model.named_parameters())).items():
        if p.requires_grad:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            found[f"grad of {name}"] = grad
    floating = ((n, x) for n, x in model.named_buffers() if x.is_floating_point())
    found |= {f"buffer {name}": x for name, x in floating}
    return {name: whole(y).detach().clone() for name, y in found.items()}


@contextmanager
def warnings(level: int = logging.WARNING) -> Iterator[list[str]]:
    """The texts of our own warnings, in order, or of all from another level on."""
    texts: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    log, before = logging.getLogger("cpcompile"), logging.getLogger("cpcompile").level
    log.addHandler(handler)
    log.setLevel(level if level < logging.WARNING else before)
    try:
        yield texts
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def _like(y: Tensor, weight: Tensor) -> Tensor:
    if not isinstance(y, DTensor):
        return weight
    everywhere = [Replicate()] * y.device_mesh.ndim
    return DTensor.from_local(weight, y.device_mesh, everywhere, run_check=False)
