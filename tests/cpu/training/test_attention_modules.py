"""nn.MultiheadAttention and the layers of nn.Transformer, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from cpcompile.reporting.graph_report import recording
from tests.cpu.against_one_process import Comparison, compare, compare_calls
from tests.cpu.attention_cases import compiled_on
from tests.cpu.attention_modules import (
    HEADS,
    MASKED,
    MODULES,
    TEXT,
    WIDTH,
    Case,
    encoder,
)
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import check, deviations

ALL = MODULES | MASKED


class Step(nn.Module):
    """The call of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.call, self.module = case.call, case.make()

    def forward(self, x: Tensor, text: Tensor) -> object:
        return self.call(self.module, x, text)


def check_rewritten(name: str, rewritten: list[bool]) -> None:
    """Of calls with masks only the number is known."""
    wanted = ALL[name].rewritten
    assert len(rewritten) == len(wanted)
    assert name in MASKED or tuple(rewritten) == wanted


CASES = [
    (x, s, door) for x in MODULES for s in (16, 13) for door in ("plain", "dtensor")
]
CASES += [(x, seq, "plain") for x in MASKED for seq in (16, 13)]


@pytest.mark.parametrize(("name", "seq", "door"), CASES)
@on_ranks(2)
def test_modules(name, seq, door):
    torch.manual_seed(0)
    case, dim = ALL[name], int(ALL[name].batch_first)
    shape = (2, seq, WIDTH) if case.batch_first else (seq, 2, WIDTH)
    x = torch.randn(shape, dtype=torch.float64).requires_grad_()
    text = torch.randn(2, TEXT, WIDTH, dtype=torch.float64).requires_grad_()
    options = {"strict": name in MODULES, "fullgraph": True}
    options |= {"shard": {"x": dim}} if door == "plain" else {}
    model = Step(case).double().train()
    found = compare_calls(model, [(x, text)], 2, door, (dim, 1), **options)
    found.check()
    check_rewritten(name, found.rewritten)


IN_EVALUATION = ("encoder layer", "norm first", "encoder", "self", "weights")
MASKED_IN_EVALUATION = ("encoder, padding", "padding")


@pytest.mark.parametrize(
    ("name", "seq"),
    [
        *((name, seq) for name in IN_EVALUATION for seq in (16, 13)),
        *((name, 13) for name in MASKED_IN_EVALUATION),
    ],
)
@on_ranks(2)
def test_modules_in_evaluation(name, seq):
    """Without gradients an encoder layer is one operator of torch as a whole.

    In eager an encoder with padding takes nested tensors, whose results differ where
    tokens are hidden, so the reference is traced.
    """
    torch._dynamo.reset()
    model = Step(ALL[name]).double().eval()
    x = torch.randn(2, seq, WIDTH, dtype=torch.float64)
    step = compiled_on(2, model, shard={"x": 1}, strict=name in MODULES)
    with torch.no_grad(), recording() as reports:
        got = pytree.tree_leaves(step(x, x))
        wanted = pytree.tree_leaves(torch.compile(model, backend="eager")(x, x))
    names = [f"output {number}" for number in range(len(wanted))]
    check(deviations(*(dict(zip(names, y, strict=True)) for y in (got, wanted))))
    check_rewritten(name, Comparison([], [], reports).rewritten)


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


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("tokens", [16, 17, 5])
@pytest.mark.parametrize("name", FLATTENING)
@on_ranks("world")
def test_flattened_tokens_are_not_gathered(name, tokens, world):
    """Uneven parts, and 5 tokens of which the last of four ranks has none."""
    found = compare(FLATTENING[name], (3, tokens, WIDTH), world, inner="aot_eager")
    found.check()
    assert not [text for text in found.warnings if "gathered tensors" in text]
