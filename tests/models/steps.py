"""The steps of a setting on one model: the same code in one process and on ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from cpcompile.apps.verification.steps import loss_of, named_tensors
from tests.models.case import BATCH, Case
from tests.models.setting import Mode, Setting
from tests.models.torchvision_schemas import define_schemas

SEED = 7

# One compiled model meets these lengths; images have the same one in each call.
CALLS = ((0, True), (1, True), (0, False))  # (which length, training)


def lengths(case: Case, setting: Setting) -> list[tuple[int, bool]]:
    """(length, training) of every call."""
    first = case.lengths[0] if setting.length is None else setting.length
    if setting.mode is Mode.BOTH:
        return [(first, True), (first, False)]
    if setting.mode is not Mode.CALLS:
        return [(first, setting.mode is Mode.TRAIN)]
    known = case.lengths if len(case.lengths) > 1 else case.lengths * 2
    return [(known[number], training) for number, training in CALLS]


def calls(case: Case, setting: Setting) -> list[tuple[dict[str, Any], bool]]:
    """(inputs, training) of every call; the same wherever it is called."""
    torch.manual_seed(SEED)
    found = []
    for length, training in lengths(case, setting):
        inputs = case.inputs(length)
        if setting.batch is not None:
            inputs = {k: _batched(x, setting.batch) for k, x in inputs.items()}
        if setting.mode is Mode.EVAL and not case.always_labels:
            inputs.pop("labels", None)
        found.append((inputs, training))
    return found


def _batched(x: Any, batch: int) -> Any:
    """Leaves rows out, or repeats the last; of inputs that begin with the batch."""
    if not isinstance(x, Tensor) or x.shape[0] != BATCH:
        return x
    return x[[min(row, BATCH - 1) for row in range(batch)]]


def make_model(case: Case) -> nn.Module:
    """The model with the same weights wherever it is made."""
    define_schemas()  # before libraries import torchvision
    torch.manual_seed(0)
    return case.model()


def run_steps(
    case: Case,
    setting: Setting,
    model: nn.Module,
    step: Callable[..., Any],
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Results of all calls and the gradients they left, by name.

    model: has the parameters; step: is called, the model itself or what it is compiled
    to.
    """
    found: dict[str, Tensor] = {}
    for number, (inputs, training) in enumerate(calls(case, setting)):
        given = {k: _cast(x, dtype) for k, x in inputs.items()}
        model.train(training)
        torch.manual_seed(SEED)  # for models that draw numbers
        with case.around():
            with contextlib.nullcontext() if training else torch.no_grad():
                results = named_tensors(step(**given))
            if training:
                loss_of(results, case.loss).backward()
        place = f"{number}." if setting.mode in (Mode.BOTH, Mode.CALLS) else ""
        found |= {f"{place}{name}": x.detach() for name, x in results.items()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"grad {name}"] = parameter.grad
    return found


def _cast(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, list | tuple):
        return type(x)(_cast(each, dtype) for each in x)
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
