"""Values that change from call to call: torch.compile needs two programs, as alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import compiled_on
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import check, deviations, gradients

VALUES = [0.1 + n / 20 for n in range(20)]


class Model(nn.Module):
    """One layer and a loss; `factor` is where a subclass has no argument for it."""

    factor = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(31, 16), nn.Linear(16, 48)
        self.head = nn.Linear(16, 31)

    def attention(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (6, 8)).transpose(1, 2)
        y = F.scaled_dot_product_attention(*heads.chunk(3, 1), is_causal=True)
        return y.transpose(1, 2).flatten(2)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.attention(x))

    def forward(self, tokens: Tensor, factor: float) -> Tensor:
        logits = self.logits(tokens)
        return loss_of(logits, tokens) + factor * logits.square().mean()


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Attribute(Model):
    def forward(self, tokens: Tensor, factor: float) -> Tensor:
        del factor
        return super().forward(tokens, self.factor)


class Temperature(Model):
    """Of the logits, and of scores that are written out."""

    def forward(self, tokens: Tensor, factor: float) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).chunk(3, -1)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.mT / factor).masked_fill(later, float("-inf"))
        logits = self.head(x + scores.softmax(-1) @ v)
        return loss_of(logits / (1 + factor), tokens)


class Region(Model):
    """What is computed from it alone goes into a checkpoint region, and in place."""

    def forward(self, tokens: Tensor, factor: float) -> Tensor:
        x = self.embedding(tokens)
        rest = 1 - factor

        def layer(x: Tensor) -> Tensor:
            return self.attention(x) * factor - rest / 2

        x = x + checkpoint(layer, x, use_reentrant=False)
        x *= rest
        return loss_of(self.head(torch.where(x > factor, x, rest - x)), tokens)


class Twice(Model):
    """One use that torch.compile keeps no symbol for: it has a program per value."""

    def forward(self, tokens: Tensor, factor: float) -> Tensor:
        loss = super().forward(tokens, factor)
        return torch.add(loss, self.head.weight.square().sum(), alpha=factor)


MODELS = {x.__name__: x for x in (Model, Attribute, Temperature, Region, Twice)}
Step = Callable[[Tensor, float], Tensor]


def batch(rows: int = 2, length: int = 12) -> Tensor:
    return torch.randint(31, (rows, length), generator=torch.Generator().manual_seed(3))


# The model; `dynamic`; and the programs for VALUES. One use is of a kind that
# torch.compile keeps no symbol for.
FLOATS = [
    *((x, None, 2) for x in ("Model", "Attribute", "Temperature", "Region")),
    ("Model", True, 2),
    ("Twice", None, 4),
]
INFINITE = [0.1, 0.2, float("nan"), float("inf"), -float("inf"), 0.0, 0.3]


def check_floats(name: str, values: list[float], dynamic: bool | None = None) -> int:
    """Compare loss and gradients of each value; return the number of programs."""
    counters.clear()
    model, tokens = MODELS[name]().double(), batch()
    exact = copy.deepcopy(model)
    step = compiled_on(2, model, dynamic=dynamic)
    for value in values:
        model.factor = exact.factor = value
        check_step(step, model, exact, tokens, value)
    programs: int = counters["stats"]["unique_graphs"]
    return programs


def check_step(
    step: Step, model: nn.Module, exact: nn.Module, tokens: Tensor, value: float
) -> None:
    """Compare loss and gradients of one call, finite or not."""
    results = []
    for call, module in ((step, model), (exact, exact)):
        module.zero_grad()
        loss = call(tokens, value)
        found = {"loss": loss.detach()} | gradients(loss, module)
        results.append({k: x.nan_to_num(9, 8, 7) for k, x in found.items()})
    check(deviations(*results))


@pytest.mark.parametrize(("name", "dynamic", "programs"), FLOATS)
@on_ranks(2)
def test_a_float_that_changes_has_two_programs(name, dynamic, programs):
    values = VALUES[:4] if name == "Twice" else VALUES
    assert check_floats(name, values, dynamic) == programs


@pytest.mark.parametrize("name", ["Model", "Region"])
@on_ranks(2)
def test_a_float_that_is_not_finite(name):
    """Results are those of one process, on all ranks."""
    check_floats(name, INFINITE)


# No row, and one, are programs of their own in torch.compile.
@pytest.mark.parametrize(
    ("rows", "length"),
    [([*range(2, 22)], 12), ([*range(2, 22)], 13), ([3, 4, 1, 5, 0, 6], 12)],
    ids=["even", "uneven", "few"],
)
@on_ranks(2)
def test_a_number_of_rows_that_changes_has_three_programs(rows, length):
    """The first, and those of even and of odd numbers, which DTensor tells apart."""
    counters.clear()
    model = Model().double()
    exact = copy.deepcopy(model)
    compiled = compiled_on(2, model)
    rings = 0
    for n in rows:
        with recording() as reports:
            check_step(compiled, model, exact, batch(n, length), 0.5)
        rings += len(reports[0].calls)
    if len(rows) == 20:
        assert (counters["stats"]["unique_graphs"], rings) == (3, 20)


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64)


def arithmetic(x: Tensor, factor: float) -> list[Tensor]:
    """Every kind of call, of tokens and of one number, which has no dimensions."""
    one = x[0, 0, 0] * 1
    found = []
    for y in (x, one):
        found += [y * factor, factor * y, y + factor, y - factor, factor - y]
        found += [y / factor, y > factor, factor >= y, y == factor]
    written = one.float().to(x.dtype) if x.is_floating_point() else one.float()
    written *= factor
    return [*found, written]


def _is_near(got: Tensor, wanted: Tensor) -> bool:
    """Tell whether bits are equal; of 16 of them, whether the last may be rounded.

    For numbers without dimensions aten rounds the float to the dtype before it adds.
    """
    if wanted.dtype not in (torch.bfloat16, torch.float16) or wanted.dim():
        return torch.equal(got, wanted)
    limit = torch.finfo(wanted.dtype).eps * (wanted.abs().float() + 1)  # floats are < 1
    return bool((got.float() - wanted.float()).abs() <= limit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(2)
def test_a_float_that_changes_has_the_dtype_of_a_number(dtype):
    """And the bits of eager."""
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(2, 12, 3, generator=generator) * 7).to(dtype)
    step = compiled_on(2, arithmetic, shard={"x": 1})
    for factor in (0.1, 0.3, 1 / 3):
        results = zip(step(x, factor), arithmetic(x, factor), strict=True)
        for place, (got, wanted) in enumerate(results):
            assert got.dtype == wanted.dtype, (place, factor)
            assert _is_near(got, wanted), (place, factor)
    assert counters["stats"]["unique_graphs"] >= 2
