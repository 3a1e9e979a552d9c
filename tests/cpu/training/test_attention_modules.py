"""nn.MultiheadAttention and the layers of nn.Transformer, against one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import cpcompile as cp
from cpcompile.reporting.report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.attention_modules import MASKED, MODULES, TEXT, WIDTH, Case
from tests.support.bounds import Deviation, Values, check, deviations


def step_of(case: Case, module: nn.Module) -> Callable[[Tensor, Tensor], object]:
    def step(x, text):
        return case.call(module, x, text)

    return step


def results(step, module, x, text) -> Values:
    """What the step returns, and the gradients of a sum that weighs all differently."""
    outputs = pytree.tree_leaves(step(x, text))
    outputs = [y.full_tensor() if isinstance(y, DTensor) else y for y in outputs]
    loss = sum((y * torch.arange(y.numel()).view(y.shape).cos()).sum() for y in outputs)
    given = {"x": x, "text": text} | dict(module.named_parameters())
    grads = torch.autograd.grad(loss, list(given.values()), allow_unused=True)
    named = zip(given, grads, strict=True)
    return _named(outputs) | {f"grad of {n}": y for n, y in named if y is not None}


def _named(outputs: list[Tensor]) -> dict[str, Tensor]:
    return {f"output {n}": y.detach() for n, y in enumerate(outputs)}


def run_module(
    group: str, name: str, seq: int, world: int, door: str
) -> tuple[list[Deviation], list[bool]]:
    """Deviations in float64, and which calls were rewritten."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    case = {"modules": MODULES, "masked": MASKED}[group][name]
    module, mesh = case.make().double().train(), sequence_mesh(world)
    shape = (2, seq, WIDTH) if case.batch_first else (seq, 2, WIDTH)
    dim = 1 if case.batch_first else 0
    x = torch.randn(shape, dtype=torch.float64)
    text = torch.randn(2, TEXT, WIDTH, dtype=torch.float64)
    inputs = [y.clone().requires_grad_() for y in (x, text)]
    wanted = results(step_of(case, module), module, *inputs)
    options = {"inner": "aot_eager", "strict": group == "modules"}
    if door == "plain":
        options |= {"mesh": mesh, "shard": {"x": dim}}
    else:
        x, text = cp.shard(x, mesh, dim), cp.shard(text, mesh, 1)
    inputs = [y.clone().requires_grad_() for y in (x, text)]
    step = torch.compile(
        step_of(case, module), backend="cp", options=options, fullgraph=True
    )
    with recording() as reports:
        got = results(step, module, *inputs)
    rewritten = [c.plan is not None for r in reports for c in r.calls]
    return deviations(got, wanted), rewritten


@pytest.mark.core(
    "self-16-plain",
    "sequence first-16-plain",
    "causal-13-dtensor",
    "weights-16-dtensor",
)
@pytest.mark.parametrize("door", ["plain", "dtensor"])
@pytest.mark.parametrize("seq", [16, 13])
@pytest.mark.parametrize("name", MODULES)
def test_modules(pools, name, seq, door):
    for found, rewritten in pools[2].run(
        run_module, "modules", name, seq, 2, door, timeout=90
    ):
        check(found)
        assert tuple(rewritten) == MODULES[name].rewritten


@pytest.mark.core("bool mask-13")
@pytest.mark.parametrize("seq", [16, 13])
@pytest.mark.parametrize("name", MASKED)
def test_modules_with_masks(pools, name, seq):
    for found, rewritten in pools[2].run(
        run_module, "masked", name, seq, 2, "plain", timeout=90
    ):
        check(found)
        assert len(rewritten) == len(MASKED[name].rewritten)


IN_EVALUATION = ("encoder layer", "norm first", "encoder", "self", "weights")
MASKED_IN_EVALUATION = ("encoder, padding", "padding")


def run_in_evaluation(
    group: str, name: str, seq: int
) -> tuple[list[Deviation], list[bool]]:
    """Without gradients an encoder layer is one operator of torch as a whole.

    In eager an encoder with padding takes nested tensors, whose results differ where
    tokens are hidden, so the reference is traced.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    case = {"modules": MODULES, "masked": MASKED}[group][name]
    module = case.make().double().eval()
    x = torch.randn(2, seq, WIDTH, dtype=torch.float64)
    options = {"mesh": sequence_mesh(2), "shard": {"x": 1}, "inner": "aot_eager"}
    options |= {"strict": group == "modules"}
    step = torch.compile(step_of(case, module), backend="cp", options=options)
    with torch.no_grad(), recording() as reports:
        got = pytree.tree_leaves(step(x, x))
        traced = torch.compile(step_of(case, module), backend="eager")
        wanted = pytree.tree_leaves(traced(x, x))
    return deviations(_named(got), _named(wanted)), [
        c.plan is not None for r in reports for c in r.calls
    ]


@pytest.mark.core("encoder layer-13")
@pytest.mark.parametrize("seq", [16, 13])
@pytest.mark.parametrize("name", IN_EVALUATION)
def test_modules_in_evaluation(pools, name, seq):
    for found, rewritten in pools[2].run(
        run_in_evaluation, "modules", name, seq, timeout=90
    ):
        check(found)
        assert tuple(rewritten) == MODULES[name].rewritten


@pytest.mark.parametrize("name", MASKED_IN_EVALUATION)
def test_masked_modules_in_evaluation(pools, name):
    for found, rewritten in pools[2].run(
        run_in_evaluation, "masked", name, 13, timeout=90
    ):
        check(found)
        assert len(rewritten) == len(MASKED[name].rewritten)
