"""Run a few training steps of a model: the same code on one and on all ranks.

Results and gradients are those of the first step. Then plain gradient descent moves the
weights, so that a fault of a later call, or of a gradient that only adds up, shows in
the losses and the weights. Adam would not do: it divides gradients by their size, and
so makes a weight out of the noise of a gradient that is zero.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cpcompile.apps.verification.bounds import default_dtype, whole
from cpcompile.apps.verification.model_results import loss_of, named_tensors
from cpcompile.apps.verification.widening import Widened
from cpcompile.torch_private import pytree

SEED = 7
# The first step moves the weights by this share of their norm.
MOVE = 0.01


@dataclass(frozen=True)
class ComparedProgram:
    """A model and the arguments of its call."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    steps: int

    def copied(self, dtype: torch.dtype | None = None) -> ComparedProgram:
        """Return a copy that shares nothing; floating-point numbers in `dtype`."""
        model = copy.deepcopy(self.model)
        model = model.to(dtype) if dtype else model
        return ComparedProgram(model, *self.inputs(dtype), self.steps)

    def inputs(
        self, dtype: torch.dtype | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return copies of the arguments, which may be written to and get gradients."""
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda x: _copied(x, dtype), (self.args, dict(self.kwargs))
        )
        return args, kwargs


@dataclass(frozen=True)
class Reference:
    """What one process computes.

    exact: in float64. rough: in the dtype of the model, by other orders of summation.
    rate: of the gradient descent. drawn: whether random numbers are drawn.
    """

    exact: dict[str, Tensor]
    rough: tuple[dict[str, Tensor], ...]
    rate: float
    drawn: bool


def reference(program: ComparedProgram, tick: Callable[[str], None]) -> Reference:
    """Run on this process alone: in float64, as it is, and with plain attention."""
    tick("one process, as the model is")
    before = torch.get_rng_state()
    drawn = _draws_numbers(program)
    torch.set_rng_state(before)
    # The numbers that a compiled graph draws are those of aot_eager.
    compiler = _aot_eager if drawn else _eager
    tick("one process, in float64")
    try:
        rate, values = _exact(program, compiler)
    except (RuntimeError, TypeError):  # a model that asks for float32 by name
        with Widened():
            rate, values = _exact(program, compiler)
    tick("one process, for the bounds")
    rough = []
    for backend in (nullcontext(), sdpa_kernel(SDPBackend.MATH)):
        again = program.copied()
        with backend:
            rough.append(results_of(again, compiler(again.model), rate))
    return Reference(values, tuple(rough), rate, drawn)


def _exact(
    program: ComparedProgram, compiler: Callable[..., Callable[..., Any]]
) -> tuple[float, dict[str, Tensor]]:
    """Return the rate of the descent, and what the model computes in float64."""
    exact = program.copied(torch.float64)
    with default_dtype(torch.float64):
        call = compiler(exact.model)
        rate = _rate(exact.model, results_of(exact, call, 0.0, steps=0))
        exact = program.copied(torch.float64)
        return rate, results_of(exact, compiler(exact.model), rate)


def by_inductor(program: ComparedProgram, rate: float) -> dict[str, Tensor]:
    """Run the same by Inductor without cpcompile, whose functions round differently."""
    again = program.copied()
    return results_of(again, torch.compile(again.model), rate)


def results_of(
    program: ComparedProgram,
    call: Callable[..., Any],
    rate: float,
    steps: int | None = None,
) -> dict[str, Tensor]:
    """Run steps; return results, losses, gradients, last weights and buffers, by name.

    call: what runs the model. rate: of the descent; steps: 0 for gradients alone.
    """
    steps = program.steps if steps is None else steps
    tensors: dict[str, Tensor] = {}
    model = program.model
    for number in range(max(steps, 1)):
        model.zero_grad()
        torch.manual_seed(SEED + number)
        args, kwargs = program.inputs()
        results = named_tensors(call(*args, **kwargs))
        trains = any(x.requires_grad for x in results.values())
        if trains:
            loss = _loss(results)
            loss.backward()
            tensors[f"loss step {number + 1}"] = whole(loss)
        if number == 0:
            tensors |= {f"result {n}": whole(x) for n, x in results.items()}
            tensors |= dict(_gradients(model, (args, kwargs)))
        if trains and steps:
            _descend(model, rate)
    if steps:
        tensors |= {f"weight {n}": whole(x).clone() for n, x in _weights(model)}
    return tensors | {f"buffer {n}": whole(x) for n, x in _buffers(model)}


def _loss(results: Mapping[str, Tensor]) -> Tensor:
    scalars = [n for n, x in results.items() if x.ndim == 0 and x.requires_grad]
    return loss_of(results, "loss" if "loss" in results else (*scalars, "loss")[0])


def _gradients(model: nn.Module, inputs: Any) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield f"gradient {name}", whole(parameter.grad).clone()
    leaves = pytree.tree_flatten_with_path(inputs)[0]
    for path, x in leaves:
        if isinstance(x, Tensor) and x.grad is not None:
            yield f"gradient of input {pytree.keystr(path[1:])}", whole(x.grad).clone()


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, x in model.named_parameters():
        if x.requires_grad:
            yield name, x


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, x in model.named_buffers():
        if x.is_floating_point():
            yield name, x.clone()


def _descend(model: nn.Module, rate: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=rate)


def _rate(model: nn.Module, tensors: Mapping[str, Tensor]) -> float:
    """Return the rate of a first step that moves the weights by MOVE of their norm."""
    sizes = [x.detach().square().sum() for _, x in _weights(model)]
    grads = [x.square().sum() for n, x in tensors.items() if n.startswith("gradient ")]
    if not sizes or not grads or not float(sum(grads)):
        return 0.0
    return MOVE * math.sqrt(float(sum(sizes)) / float(sum(grads)))


def _draws_numbers(program: ComparedProgram) -> bool:
    """Tell whether a call of the model draws random numbers."""
    again = program.copied()
    torch.manual_seed(SEED)
    before = torch.get_rng_state()
    with torch.no_grad():
        again.model(*again.args, **again.kwargs)
    return not torch.equal(before, torch.get_rng_state())


def _copied(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    y = x.detach().clone()
    y = y.to(dtype) if dtype is not None and y.is_floating_point() else y
    return y.requires_grad_(x.requires_grad)


def _eager(model: nn.Module) -> Callable[..., Any]:
    return model


def _aot_eager(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend="aot_eager")
