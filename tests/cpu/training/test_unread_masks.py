"""Masks of whatever origin are exact on several ranks, with their gradients.

All numbers are float64, and so is the reference of one process; see Note [Derived
bounds] in tests/support/bounds.py.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cpcompile as cp
from cpcompile.passes.joint.tiling import sink_slices
from cpcompile.passes.model.masks import unread_masks
from tests.cpu.against_one_process import compare_calls
from tests.cpu.on_ranks import on_ranks

WIDTH, HEADS, SEEN = 16, 2, 4


class Masked(nn.Module):
    """A layer of causal attention, and one with the mask that the tests are about.

    of: makes the mask of the model, hidden states [B, S, C], tokens [B, S] and pairs
    [B, 1, S, S]. how: where it is computed.
    """

    def __init__(self, of: Callable[..., Tensor], how: str = "in the layer") -> None:
        super().__init__()
        self.of, self.how = of, how
        self.embedding = nn.Embedding(50, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.of_queries, self.of_keys = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.left = nn.Parameter(torch.randn(HEADS, 32, 4))
        self.right = nn.Parameter(torch.randn(HEADS, 4, 32))
        seen = own((torch.rand(32, 32) > 0.3).tril())
        numbers = torch.randn(1, HEADS, 32, 32, dtype=torch.float64)
        self.register_buffer("seen", seen)
        self.register_buffer("bias", numbers.masked_fill(~seen, -torch.inf))

    def forward(self, tokens: Tensor, pairs: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attend(x, 0, causal(x))
        if self.how == "in a region":
            x = checkpoint(self.layer, x, tokens, pairs, use_reentrant=False)
        elif self.how == "before a region":
            mask = self.of(self, x, tokens, pairs)
            x = checkpoint(self.attend, x, 1, mask, use_reentrant=False)
        elif self.how == "of a region":
            mask = checkpoint(self.of, self, x, tokens, pairs, use_reentrant=False)
            x = self.attend(x, 1, mask)
        else:
            x = self.layer(x, tokens, pairs)
        return x.sin().sum(-1).square().mean()

    def layer(self, x: Tensor, tokens: Tensor, pairs: Tensor) -> Tensor:
        return self.attend(x, 1, self.of(self, x, tokens, pairs))

    def attend(self, x: Tensor, layer: int, mask: Tensor) -> Tensor:
        parts = self.qkv[layer](x).chunk(3, -1)
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in parts)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return y.transpose(1, 2).flatten(2)

    def scores(self, x: Tensor) -> Tensor:
        return torch.tanh(self.of_queries(x) @ self.of_keys(x).mT)


def causal(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    return at[:, None] >= at


def own(seen: Tensor) -> Tensor:
    """Every query sees its own key, so that no row is empty."""
    return seen | torch.eye(seen.shape[-1], dtype=torch.bool)


def indexer(model, x, tokens, pairs):
    """DeepSeek-V3.2: each query sees the keys of its highest scores."""
    with torch.no_grad():
        scores = model.scores(x).relu().masked_fill(~causal(x), -torch.inf)
        chosen = scores.topk(SEEN, -1).indices.to(torch.int32)
    hidden = chosen.new_ones(scores.shape, dtype=torch.bool)
    hidden = hidden.scatter(-1, chosen.long(), False).unsqueeze(1)
    return causal(x) & ~hidden


def scattered(model, x, tokens, pairs):
    chosen = pairs.topk(SEEN, -1).indices
    return torch.full_like(pairs, -torch.inf).scatter(-1, chosen, 0.0)


def many_steps(model, x, tokens, pairs):
    seen = pairs > 0
    for number in range(130):
        seen = seen ^ (pairs > number / 10)
    return own(seen)


def by_rank_one(model, x, tokens, pairs):
    """A table of pairs with a gradient."""
    size = x.shape[1]
    return (model.left @ model.right)[:, :size, :size].softmax(-1)


def part(buffer: Tensor, x: Tensor) -> Tensor:
    """As GPT-2: of a buffer for the longest sequence each call takes a part."""
    return buffer[..., : x.shape[1], : x.shape[1]]


BUFFERS = {
    "bool": lambda m, x, t, pairs: part(m.seen, x),
    "numbers": lambda m, x, t, pairs: part(m.bias, x),
}
MASKS = BUFFERS | {
    "indexer": indexer,
    "scattered": scattered,
    "matmul": lambda m, x, t, pairs: pairs @ pairs.mT,
    "cumsum over keys": lambda m, x, t, pairs: own((pairs > 0).cumsum(-1) > 3),
    "cumsum over queries": lambda m, x, t, pairs: own((pairs > 0).cumsum(-2) > 3),
    "roll": lambda m, x, t, pairs: own((pairs > 0).roll(1, -1)),
    "random": lambda m, x, t, pairs: own(torch.rand(pairs.shape[-2:]) > 0.5),
    "many steps": many_steps,
    "table": by_rank_one,
    "scores": lambda m, x, t, pairs: m.scores(x).unsqueeze(1),
}
FEW = ("indexer", "matmul", "random", "table", "scores")
CASES = [
    *((kind, 13, 2, "in the layer", "auto") for kind in MASKS if kind not in BUFFERS),
    *((kind, n, 3, "in the layer", "auto") for kind in FEW for n in (12, 13)),
    *(
        (kind, 13, 2, how, "auto")
        for how in ("in a region", "before a region", "of a region")
        for kind in ("matmul", "indexer", "scores", "random", "table")
    ),
    *(("scores", 16, 2, "in the layer", x) for x in ("ulysses", "all_gather")),
    ("scores", 16, 4, "in the layer", "hybrid"),
]


def compared(
    kind: str,
    length: int,
    world: int,
    how: str = "in the layer",
    strategy: str = "auto",
    least: int = 2**24,
) -> tuple[list[str], list[str]]:
    """Texts of the masks, and warnings, of a step that equals one process."""
    torch.manual_seed(3)
    model = Masked(MASKS[kind], how).double()
    tokens = torch.arange(2 * length).view(2, length) * 7 % 50
    pairs = torch.randn(2, 1, length, length, dtype=torch.float64).requires_grad_()
    small = cp.config.patch(whole_mask_share=0.0)
    large = mock.patch.object(unread_masks, "LEAST_LIMIT", least)
    with small, large, mock.patch.object(sink_slices, "LEAST_BYTES", least):
        calls = [(tokens, pairs)]
        found = compare_calls(model, calls, world, strategy=strategy, dynamic=False)
    found.check()
    assert found.rewritten == [True, True]
    masks = [call.mask for report in found.reports for call in report.calls]
    return masks, found.warnings


@pytest.mark.parametrize(("kind", "length", "world", "how", "strategy"), CASES)
@on_ranks("world")
def test_loss_and_gradients(kind, length, world, how, strategy):
    """Strict, and also of a length that the ranks do not divide."""
    masks, texts = compared(kind, length, world, how, strategy)
    assert masks[1].startswith("dense ")
    assert "whole on every rank (" in masks[1] or "by rows" in masks[1]
    assert [x for x in texts if "attn_mask" in x] == []
    if strategy != "auto":
        assert masks[1] == "dense float64 [2, 1, 16, 16], by rows"


LENGTHS = (24, 32, 17, 24)
# Rows of a mask that is a tensor are exchanged with the heads of a hybrid. The second
# length would be a symbol; the size of a mask is compiled as it is.
OF_BUFFERS = [
    *((kind, (24,), {"strategy": "ring"}) for kind in BUFFERS),
    *((kind, (24,), {"strategy": "hybrid"}) for kind in BUFFERS),
    *((kind, LENGTHS, {"strategy": "ring"}) for kind in ("bool", "numbers")),
    ("bool", (24,), {"strategy": "ring", "inner": "inductor"}),
]


@pytest.mark.parametrize(("kind", "lengths", "options"), OF_BUFFERS, ids=str)
@on_ranks(lambda options: 4 if options["strategy"] == "hybrid" else 2)
def test_masks_of_buffers(kind, lengths, options):
    torch.manual_seed(3)
    calls = [
        (torch.arange(2 * n).view(2, n) % 50, torch.zeros(2, 1, n, n)) for n in lengths
    ]
    world = 4 if options["strategy"] == "hybrid" else 2
    dynamic = None if len(calls) > 1 else False
    model = Masked(BUFFERS[kind]).double()
    found = compare_calls(model, calls, world, dynamic=dynamic, **options)
    found.check()
    assert found.rewritten == [True, True] * len(calls)


ROW_BY_ROW = ("matmul", "scattered", "roll", "many steps")


@pytest.mark.parametrize("kind", ROW_BY_ROW)
@on_ranks(2)
def test_rows_of_large_masks(kind):
    """Each rank computes those of its queries, and nobody is warned."""
    masks, texts = compared(kind, 13, 2, least=0)
    assert "whole on every rank" not in masks[1]
    assert not [x for x in texts if "attn_mask" in x]


@on_ranks(2)
def test_both_sides_of_the_limit():
    """A mask of one byte more than the limit gives one warning with its price."""
    size = 2 * 13 * 13
    for least in (size, size - 1):
        masks, texts = compared("cumsum over queries", 13, 2, least=least)
        assert (
            masks[1] == f"dense bool [2, 1, 13, 13], whole on every rank ({size} bytes)"
        )
        price = [x for x in texts if f"computes all {size} bytes" in x]
        assert len(texts) == len(price) == int(least < size)
