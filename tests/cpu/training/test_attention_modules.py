"""nn.MultiheadAttention and the layers of nn.Transformer, against one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import cpcompile as cp
from cpcompile.reporting.graph_report import recording
from tests.cpu.against_one_process import Comparison, compare
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.attention_modules import (
    HEADS,
    MASKED,
    MODULES,
    TEXT,
    WIDTH,
    Case,
    encoder,
)
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


@pytest.mark.parametrize("door", ["plain", "dtensor"])
@pytest.mark.parametrize("seq", [16, 13])
@pytest.mark.parametrize("name", MODULES)
def test_modules(pools, name, seq, door):
    for found, rewritten in pools[2].run(
        run_module, "modules", name, seq, 2, door, timeout=90
    ):
        check(found)
        assert tuple(rewritten) == MODULES[name].rewritten


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


class VisionTransformer(nn.Module):
    """As torchvision: a class token, and nn.MultiheadAttention in every block."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.blocks = nn.ModuleList(make() for make in [encoder(norm_first=True)] * 2)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


class Flattened(nn.Module):
    """Attention, and an MLP on all tokens of all entries in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        rows = x.transpose(0, 1).reshape(-1, WIDTH)
        rows = rows + F.gelu(self.up(rows)) @ self.down.t()
        return rows.view(x.shape[1], x.shape[0], -1).transpose(0, 1)


FLATTENING = {
    "vision": VisionTransformer,
    "encoder": encoder(),
    "flattened": Flattened,
}


def run_flattening(name: str, tokens: int, world: int, inner: str) -> Comparison:
    return compare(FLATTENING[name], (3, tokens, WIDTH), world, inner=inner)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("tokens", [16, 17, 5])
@pytest.mark.parametrize("name", FLATTENING)
def test_flattened_tokens_are_not_gathered(pools, name, tokens, world):
    """Uneven parts, and 5 tokens of which the last of four ranks has none."""
    for found in pools[world].run(
        run_flattening, name, tokens, world, "aot_eager", timeout=90
    ):
        found.check()
        assert not [text for text in found.warnings if "gathered tensors" in text]
