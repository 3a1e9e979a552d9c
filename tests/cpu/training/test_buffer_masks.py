"""Models whose masks are parts of buffers, padded, or written in a loop, on two ranks.

All numbers are float64, and so is the reference of one process; see Note [Derived
bounds] in tests/support/bounds.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.support.bounds import check, deviations, step

LONGEST, WIDTH, HEADS = 40, 16, 2


class Buffers(nn.Module):
    """GPT-2: one buffer for the longest sequence, of which each call takes a part."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        seen = torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril()
        seen &= torch.rand(LONGEST, LONGEST) > 0.3
        seen.fill_diagonal_(True)
        numbers = torch.randn(1, HEADS, LONGEST, LONGEST, dtype=torch.float64)
        self.register_buffer("seen", seen)
        self.register_buffer("bias", numbers.masked_fill(~seen, -torch.inf))
        self.embedding = nn.Embedding(50, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def mask(self, tokens: int) -> Tensor:
        if self.kind == "bool":
            return self.seen[:tokens, :tokens]
        if self.kind == "numbers":
            return self.bias[:, :, :tokens, :tokens]
        if self.kind == "of two":
            both = self.bias + 0.5 * self.bias.flip(1)
            return both[:, :, :tokens, :tokens]
        if self.kind == "padded":  # x-transformers: one head has no bias
            return F.pad(self.bias[:, :1, :tokens, :tokens], (0, 0, 0, 0, 0, 1))
        assert self.kind == "rows"
        mask = torch.full((tokens, tokens), -torch.inf, dtype=torch.float64)
        for i in range(tokens):
            mask[i, max(0, i - 5) : i + 1] = 0.0
        return mask

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in parts)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x.shape[1]))
        return y.transpose(1, 2).flatten(2).sin().sum(-1).square().mean()


KINDS = ("bool", "numbers", "of two", "padded", "rows")


def run(
    kind: str,
    lengths: tuple[int, ...],
    inner: str,
    strategy: str = "ring",
    world: int = 2,
) -> list[tuple]:
    """Per length: deviations, and which calls are sharded."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    whole = Buffers(kind).double()
    model = copy.deepcopy(whole)
    options = {"mesh": sequence_mesh(world), "strategy": strategy, "inner": inner}
    dynamic = None if len(lengths) > 1 else False
    compiled = torch.compile(model, backend="cp", options=options, dynamic=dynamic)
    answers = []
    for length in lengths:
        tokens = torch.arange(2 * length).view(2, length) % 50
        with recording() as reports:
            got = step(compiled, model, tokens)
        found = deviations(got, step(whole, whole, tokens))
        answers.append((found, [c.plan is not None for r in reports for c in r.calls]))
    return answers


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients(pools, kind):
    for answers in pools[2].run(run, kind, (24,), "aot_eager", timeout=170):
        ((found, sharded),) = answers
        check(found)
        assert sharded == [True]


@pytest.mark.parametrize("kind", KINDS)
def test_hybrids(pools, kind):
    """Rows of a mask that is a tensor are exchanged with the heads."""
    for answers in pools[4].run(run, kind, (24,), "aot_eager", "hybrid", 4, timeout=90):
        ((found, sharded),) = answers
        check(found)
        assert sharded == [True]


@pytest.mark.parametrize("kind", ["bool", "numbers"])
def test_each_length_has_its_part(pools, kind):
    """The second length would be a symbol; the size of a mask is compiled as it is."""
    lengths = (24, 32, 17, LONGEST, 24)
    for answers in pools[2].run(run, kind, lengths, "aot_eager", timeout=170):
        for found, sharded in answers:
            check(found)
            assert sharded == [True]


def test_compiled_by_inductor(pools):
    for answers in pools[2].run(run, "bool", (24,), "inductor", timeout=170):
        ((found, sharded),) = answers
        check(found)
        assert sharded == [True]
