"""Models whose masks are parts of buffers, padded, or written in a loop, on two ranks.

All numbers are float64, and so is the reference of one process; see Note [Derived
bounds] in tests/support/bounds.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tests.cpu.against_one_process import compare_calls
from tests.cpu.on_ranks import on_ranks

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


LENGTHS = (24, 32, 17, LONGEST, 24)
# Rows of a mask that is a tensor are exchanged with the heads of a hybrid. The second
# length would be a symbol; the size of a mask is compiled as it is.
CASES = [
    *((kind, (24,), {}) for kind in KINDS),
    *((kind, (24,), {"strategy": "hybrid"}) for kind in KINDS),
    *((kind, LENGTHS, {}) for kind in ("bool", "numbers")),
    ("bool", (24,), {"inner": "inductor"}),
]


@pytest.mark.parametrize(("kind", "lengths", "options"), CASES, ids=str)
@on_ranks(lambda options: 4 if "strategy" in options else 2)
def test_loss_and_gradients(kind, lengths, options):
    torch.manual_seed(3)
    calls = [(torch.arange(2 * n).view(2, n) % 50,) for n in lengths]
    how = {"strategy": "ring", "dynamic": None if len(calls) > 1 else False} | options
    world = 4 if how["strategy"] == "hybrid" else 2
    found = compare_calls(Buffers(kind).double(), calls, world, **how)
    found.check()
    assert found.rewritten == [True] * len(calls)
