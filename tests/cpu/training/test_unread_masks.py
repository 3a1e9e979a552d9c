"""Masks of whatever origin are exact on several ranks, with their gradients.

All numbers are float64, and so is the reference of one process; see Note [Derived
bounds] in tests/support/bounds.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cpcompile as cp
from cpcompile import logs
from cpcompile.passes.model.masks import unread_masks
from cpcompile.reporting.graph_report import recording
from tests.cpu.against_one_process import warnings
from tests.cpu.attention_cases import sequence_mesh
from tests.support.bounds import Deviation, check, deviations, step

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
        self.register_buffer("kept", torch.zeros(32, 32, dtype=torch.int64))

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


def refiner(model, x, tokens, pairs):
    """HunyuanVideo: its text refiner repeats the padding for all queries."""
    seen = (tokens % 7 > 1).view(len(tokens), 1, 1, -1).repeat(1, 1, x.shape[1], 1)
    both = (seen & seen.transpose(2, 3)).bool()
    both[:, :, :, 0] = True
    return both


def coca(model, x, tokens, pairs):
    """CoCa: the padding of its class token is repeated for the heads."""
    shown = F.pad((tokens != 3).unsqueeze(1), (0, 0, x.shape[1] - 1, 0), value=True)
    added = torch.empty(shown.shape, dtype=x.dtype).fill_(0)
    added = added.masked_fill_(~shown, -torch.inf).repeat_interleave(HEADS, 0)
    hidden = torch.zeros(causal(x).shape, dtype=x.dtype)
    added = added + hidden.masked_fill(~causal(x), -torch.inf)
    return added.view(len(tokens), HEADS, *hidden.shape)


def indexer(model, x, tokens, pairs):
    """DeepSeek-V3.2: each query sees the keys of its highest scores."""
    with torch.no_grad():
        scores = model.scores(x).relu().masked_fill(~causal(x), -torch.inf)
        chosen = scores.topk(SEEN, -1).indices.to(torch.int32)
    hidden = chosen.new_ones(scores.shape, dtype=torch.bool)
    hidden = hidden.scatter(-1, chosen.long(), False).unsqueeze(1)
    return causal(x) & ~hidden


def indexer_in_place(model, x, tokens, pairs):
    with torch.no_grad():
        scores = model.scores(x).masked_fill(~causal(x), -torch.inf)
        mask = torch.full(scores.shape, -torch.inf, dtype=x.dtype)
        mask.scatter_(-1, scores.topk(SEEN, -1).indices, 0.0)
    return mask.masked_fill(~causal(x), -torch.inf).unsqueeze(1)


def scattered(model, x, tokens, pairs):
    chosen = pairs.topk(SEEN, -1).indices
    return torch.full_like(pairs, -torch.inf).scatter(-1, chosen, 0.0)


def written_into_a_buffer(model, x, tokens, pairs):
    size = x.shape[1]
    model.kept[:size, :size] = tokens[0][:, None] * tokens[0] % 7
    return model.kept[:size, :size].cumsum(-1) % 3 > 0


def many_steps(model, x, tokens, pairs):
    seen = pairs > 0
    for number in range(130):
        seen = seen ^ (pairs > number / 10)
    return own(seen)


def by_rank_one(model, x, tokens, pairs):
    """A table of pairs with a gradient."""
    size = x.shape[1]
    return (model.left @ model.right)[:, :size, :size].softmax(-1)


MASKS = {
    "refiner": refiner,
    "coca": coca,
    "indexer": indexer,
    "indexer in place": indexer_in_place,
    "scattered": scattered,
    "matmul": lambda m, x, t, pairs: pairs @ pairs.mT,
    "bool of a matmul": lambda m, x, t, pairs: own(pairs @ pairs.mT > 0),
    "cumsum over keys": lambda m, x, t, pairs: own((pairs > 0).cumsum(-1) > 3),
    "cumsum over queries": lambda m, x, t, pairs: own((pairs > 0).cumsum(-2) > 3),
    "roll": lambda m, x, t, pairs: own((pairs > 0).roll(1, -1)),
    "sort": lambda m, x, t, pairs: pairs.sort(-1).values,
    "random": lambda m, x, t, pairs: own(torch.rand(pairs.shape[-2:]) > 0.5),
    "random normal": lambda m, x, t, pairs: torch.randn(pairs.shape, dtype=x.dtype),
    "many steps": many_steps,
    "table": by_rank_one,
    "scores": lambda m, x, t, pairs: m.scores(x).unsqueeze(1),
    "sums of scores": lambda m, x, t, pairs: m.scores(x).cumsum(-1).unsqueeze(1),
    "by key": lambda m, x, t, pairs: m.of_keys(x)[:, None, None, :, 0].cumsum(-1),
    "written into a buffer": written_into_a_buffer,
}
FEW = ("refiner", "coca", "indexer", "matmul", "random", "table", "scores")


def run(
    kind: str,
    length: int,
    world: int,
    how: str = "in the layer",
    strategy: str = "auto",
    least: int = 2**24,
) -> tuple[list[Deviation], list[str], list[str]]:
    """Deviations from one process, texts of the masks, and warnings."""
    torch._dynamo.reset()
    logs.warn_once.cache_clear()
    torch.manual_seed(3)
    whole = Masked(MASKS[kind], how).double()
    model = copy.deepcopy(whole)
    tokens = torch.arange(2 * length).view(2, length) * 7 % 50
    pairs = torch.randn(2, 1, length, length, dtype=torch.float64)
    options = {"mesh": sequence_mesh(world), "inner": "aot_eager"}
    options |= {"strategy": strategy}
    compiled = torch.compile(model, backend="cp", options=options, dynamic=False)

    def results(call, model):
        given = pairs.clone().requires_grad_()
        torch.manual_seed(5)
        values = step(call, model, tokens, given)
        gradient = pairs * 0 if given.grad is None else given.grad
        return values | {"grad of pairs": gradient}

    small = cp.config.patch(whole_mask_share=0.0)
    least = mock.patch.object(unread_masks, "LEAST_LIMIT", least)
    with small, least, recording() as reports, warnings() as texts:
        got = results(compiled, model)
    found = deviations(got, results(whole, whole))
    masks = [c.mask for r in reports for c in r.calls if c.plan is not None]
    return found, masks, texts


@pytest.mark.parametrize("kind", MASKS)
def test_loss_and_gradients(pools, kind):
    """Strict, and of a length that the ranks do not divide."""
    for found, masks, texts in pools[2].run(run, kind, 13, 2, timeout=120):
        check(found)
        assert len(masks) == 2 and masks[1].startswith("dense ")
        assert "whole on every rank (" in masks[1] or "by rows" in masks[1]
        assert [x for x in texts if "attn_mask" in x] == []


@pytest.mark.parametrize("length", [12, 13])
@pytest.mark.parametrize("kind", FEW)
def test_on_three_ranks(pools, kind, length):
    for found, masks, _ in pools[3].run(run, kind, length, 3, timeout=120):
        check(found)
        assert len(masks) == 2


@pytest.mark.parametrize("kind", ["matmul", "indexer", "scores", "random", "table"])
@pytest.mark.parametrize("how", ["in a region", "before a region", "of a region"])
def test_checkpoint_regions(pools, how, kind):
    for found, masks, _ in pools[2].run(run, kind, 13, 2, how, timeout=120):
        check(found)
        assert len(masks) == 2


@pytest.mark.parametrize("strategy", ["ulysses", "all_gather", "hybrid"])
def test_strategies(pools, strategy):
    world = 4 if strategy == "hybrid" else 2
    job = ("scores", 16, world, "in the layer", strategy)
    for found, masks, _ in pools[world].run(run, *job, timeout=120):
        check(found)
        assert masks[1] == "dense float64 [2, 1, 16, 16], by rows"


ROW_BY_ROW = ("matmul", "scattered", "sort", "bool of a matmul", "roll", "many steps")


@pytest.mark.parametrize("kind", ROW_BY_ROW)
def test_rows_of_large_masks(pools, kind):
    """Each rank computes those of its queries, and nobody is warned."""
    job = (kind, 13, 2, "in the layer", "auto", 0)
    for found, masks, texts in pools[2].run(run, *job, timeout=120):
        check(found)
        assert masks[1].startswith("dense ")
        whole = kind == "many steps"
        assert ("whole on every rank" in masks[1]) == whole
        assert len([x for x in texts if "attn_mask" in x]) == int(whole)


def test_both_sides_of_the_limit(pools):
    """A mask of one byte more than the limit gives one warning with its price."""
    size = 2 * 13 * 13
    whole = f"dense bool [2, 1, 13, 13], whole on every rank ({size} bytes)"
    for least in (size, size - 1):
        job = ("cumsum over queries", 13, 2, "in the layer", "auto", least)
        for found, masks, texts in pools[2].run(run, *job, timeout=90):
            check(found)
            assert masks[1] == whole
            price = [x for x in texts if f"computes all {size} bytes" in x]
            assert len(texts) == len(price) == int(least < size)
