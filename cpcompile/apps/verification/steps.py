"""Run a few training steps of a model: the same code on one and on all ranks.

Results and gradients are those of the first step. Then plain gradient descent moves the
weights, so that a fault of a later call, or of a gradient that only adds up, shows in
the losses and the weights. Adam would not do: it divides gradients by their size, and
so makes a weight out of the noise of a gradient that is zero.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
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
from cpcompile.apps.verification.module_outputs import ModuleOutputs, is_output
from cpcompile.errors import InputError
from cpcompile.torch_private import pytree

SEED = 7
# The first step moves the weights by this share of their norm.
MOVE = 0.01
# Copies of one model are compiled beside each other.
RECOMPILE_LIMIT = 64


@dataclass(frozen=True)
class ComparedProgram:
    """A model and the arguments of its call.

    steps: of descent; 0 for gradients alone. by_module: keep what modules return, too.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    steps: int
    by_module: bool = False

    def copied(self, dtype: torch.dtype | None = None) -> ComparedProgram:
        """Return a copy that shares nothing; floating-point numbers in `dtype`."""
        model = copy.deepcopy(self.model)
        model = model.to(dtype) if dtype else model
        args, kwargs = self.inputs(dtype)
        return dataclasses.replace(self, model=model, args=args, kwargs=kwargs)

    def inputs(
        self, dtype: torch.dtype | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return copies of the arguments, which may be written to and get gradients."""
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda x: _copied(x, dtype), (self.args, dict(self.kwargs))
        )
        return args, kwargs

    @property
    def is_narrow(self) -> bool:
        """Tell whether some parameters are of a dtype narrower than float32."""
        floats = [x.dtype for x in self.model.parameters() if x.is_floating_point()]
        return any(x.itemsize < torch.float32.itemsize for x in floats)


@dataclass(frozen=True)
class Reference:
    """What one process computes.

    exact: in float64. rough: in the dtype of the model, by other orders of summation.
    rate: of the gradient descent.
    """

    exact: dict[str, Tensor]
    rough: tuple[dict[str, Tensor], ...]
    rate: float


def reference(program: ComparedProgram, tell: Callable[[str], None]) -> Reference:
    """Run on this process alone: in float64, as it is, and with plain attention.

    Raises: InputError for a model that does not run so.
    """
    try:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            return _reference(program, tell)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        line = str(error).strip().splitlines()[0]
        raise InputError(
            f"{type(program.model).__name__} does not run on one process, as it is and "
            f"in float64, with these inputs ({type(error).__name__}: {line}); needed a "
            "model whose calls all support float64"
        ) from error


def _reference(program: ComparedProgram, tell: Callable[[str], None]) -> Reference:
    tell("one process, as the model is")
    before = torch.get_rng_state()
    drawn = _draws_numbers(program)
    torch.set_rng_state(before)
    # The numbers that a compiled graph draws are those of aot_eager.
    compiler = _aot_eager if drawn else _eager
    tell("one process, in float64")
    try:
        rate, exact = _exact(program, compiler, torch.float64)
    except (RuntimeError, TypeError):  # a model that asks for float32 by name
        if not program.is_narrow:
            raise
        rate, exact = _exact(program, compiler, torch.float32)
    tell("one process, for the bounds")
    rough = []
    for backend in (nullcontext(), sdpa_kernel(SDPBackend.MATH)):
        again = program.copied()
        with backend:
            rough.append(results_of(again, compiler(again.model), rate))
    return Reference(exact, tuple(rough), rate)


def _exact(
    program: ComparedProgram,
    compiler: Callable[..., Callable[..., Any]],
    dtype: torch.dtype,
) -> tuple[float, dict[str, Tensor]]:
    """Return the rate of the descent, and what the model computes in a wide dtype."""
    rate = 0.0
    with default_dtype(dtype):
        if program.steps:
            first = dataclasses.replace(program.copied(dtype), steps=0)
            rate = _rate(first.model, results_of(first, compiler(first.model), 0.0))
        exact = program.copied(dtype)
        values = results_of(exact, compiler(exact.model), rate)
    return rate, {
        name: x.double() if x.is_floating_point() else x for name, x in values.items()
    }


def by_inductor(program: ComparedProgram, rate: float) -> dict[str, Tensor]:
    """Run the same by Inductor without cpcompile, whose functions round differently."""
    again = program.copied()
    return results_of(again, torch.compile(again.model), rate)


def results_of(
    program: ComparedProgram, call: Callable[..., Any], rate: float
) -> dict[str, Tensor]:
    """Run steps; return results, losses, gradients, last weights and buffers, by name.

    call: what runs the model, and has not run yet. rate: of the descent.
    """
    tensors: dict[str, Tensor] = {}
    model = program.model
    modules = None
    if program.by_module:
        modules = ModuleOutputs(model, copy.deepcopy(model), *program.inputs())
    for number in range(max(program.steps, 1)):
        model.zero_grad()
        torch.manual_seed(SEED + number)
        args, kwargs = program.inputs()
        results = named_tensors(call(*args, **kwargs))
        if number == 0 and modules is not None:
            tensors |= {f"forward {n}": whole(x) for n, x in modules.outputs.items()}
        trains = any(x.requires_grad for x in results.values())
        if trains:
            loss = _loss(results)
            loss.backward()
            tensors[f"loss step {number + 1}"] = whole(loss)
        if number == 0:
            tensors |= {f"result {n}": whole(x) for n, x in results.items()}
            tensors |= dict(_gradients(model, (args, kwargs)))
        if trains and program.steps:
            _descend(model, rate)
    if program.steps:
        tensors |= {f"weight {n}": whole(x).clone() for n, x in _weights(model)}
    return tensors | {f"buffer {n}": whole(x) for n, x in _buffers(model)}


def _loss(results: Mapping[str, Tensor]) -> Tensor:
    scalars = [n for n, x in results.items() if x.ndim == 0 and x.requires_grad]
    return loss_of(results, "loss" if "loss" in results else (*scalars, "loss")[0])


def _gradients(model: nn.Module, inputs: Any) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            kind = "backward" if is_output(name) else "gradient"
            yield f"{kind} {name}", whole(parameter.grad).clone()
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
    # As a function of its own: Dynamo's guards do not see hooks of a module.
    backend = functools.partial(torch._dynamo.lookup_backend("aot_eager"))
    return torch.compile(model, backend=backend)


def named_tensors(result: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return the floating-point tensors in what a model returns, by their place in it.

    Key/value caches of transformers are opened too.
    """
    if isinstance(result, Tensor):
        return {prefix or "output": result} if result.is_floating_point() else {}
    if isinstance(result, Mapping):
        items = list(result.items())
    elif isinstance(result, tuple | list):
        items = [(str(n), x) for n, x in enumerate(result)]
    elif hasattr(result, "self_attention_cache"):
        items = [("self", result.self_attention_cache)]
        items += [("cross", result.cross_attention_cache)]
    elif hasattr(result, "layers"):
        items = [
            (f"cache.{n}.{part}", getattr(layer, part))
            for n, layer in enumerate(result.layers)
            for part in ("keys", "values")
        ]
    else:
        return {}
    tensors: dict[str, Tensor] = {}
    for name, value in items:
        tensors |= named_tensors(value, f"{prefix}.{name}" if prefix else str(name))
    return tensors


def loss_of(results: Mapping[str, Tensor], name: str = "loss") -> Tensor:
    """Return the model's loss, or a weighted sum of all results with gradients.

    Every element of these results counts; caches are left out.
    """
    if name in results:
        return results[name]
    terms = [x for n, x in results.items() if x.requires_grad and "cache" not in n]
    loss: Tensor = torch.stack([(x * _loss_weights(x)).sum() for x in terms]).sum()
    return loss


def _loss_weights(x: Tensor) -> Tensor:
    steps = torch.arange(x.numel(), dtype=torch.float64, device=x.device)
    weights: Tensor = torch.sin(0.7 * steps + 1) / x.numel() ** 0.5
    return weights.to(x.dtype).view(x.shape)
