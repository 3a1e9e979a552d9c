"""Logits that are returned beside the loss are made later, and the loss runs in tiles.

Against one process, in float64: value, gradients of the loss, and of the logits where
they are used.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import cpcompile as cp
from cpcompile import config
from cpcompile.ranks.layout_marks import is_marked
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import compiled_on, sequence_mesh
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import default_dtype
from tests.support.settings import split

WORDS, CHANNELS = 96, 16


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(WORDS, CHANNELS)
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.head = nn.Linear(CHANNELS, WORDS, bias=kind != "tied")
        self.scale = nn.Parameter(torch.ones(WORDS, CHANNELS))
        if kind == "tied":
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        q, k, v = self.qkv(x).unflatten(-1, (6, -1)).transpose(1, 2).chunk(3, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).flatten(2)
        if self.kind == "weight made of two":
            logits = F.linear(x, self.head.weight * self.scale, self.head.bias)
        elif self.kind == "autocast inside":  # of which float64 takes no notice
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = self.head(x)
        else:
            logits = self.head(x)
        if self.kind == "capped":
            logits = 5 * torch.tanh(logits / 5)
        if self.kind == "along tokens":
            logits = logits.cumsum(1)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())
        return (logits,) if self.kind == "alone" else (loss, logits)


def plain(x: Tensor) -> Tensor:
    return cp.unshard(x) if isinstance(x, DTensor) else x


def step(call: Any, model: nn.Module, ids: Tensor, uses: str) -> dict[str, Tensor]:
    """Gradients of the loss, of the logits, or of both."""
    model.zero_grad()
    *loss, logits = call(ids)
    whole = plain(logits)
    total = loss[0] if loss and uses != "logits" else whole.new_zeros(())
    if uses != "loss":
        total = total + (whole.sin() * torch.linspace(-1, 1, WORDS)).sum()
    if total.requires_grad:
        total.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    found = {n: x.clone() for n, x in grads.items() if x is not None}
    return found | {"total": total.detach(), "logits": whole.detach()}


def run(
    kind: str, tokens: int, options: dict[str, Any]
) -> tuple[list[type], list[Any], list[str]]:
    """Compare steps; the types of logits, the tiles, and what is made later."""
    steps = []
    with default_dtype(torch.float64):
        model, ids = Model(kind), torch.randint(WORDS, (2, tokens))
        options, settings = split(options)
        with settings, config.patch(tile_least_megabytes=1e-3), recording() as reports:
            world = torch.distributed.get_world_size()
            compiled = compiled_on(world, model, **options)
            for uses in ("loss", "both", "logits"):
                got, kinds = step(compiled, model, ids, uses), type(compiled(ids)[-1])
                wanted = step(model, model, ids, uses)
                assert_close(got, wanted, rtol=1e-9, atol=1e-10)
                steps.append(kinds)
        with torch.no_grad():
            assert_close(plain(compiled(ids)[-1]), model(ids)[-1])
    tiles = [tile for report in reports for tile in report.tiles]
    later = sorted({name for report in reports for name in report.later})
    return steps, tiles, later


LATER = ["plain", "tied", "capped", "weight made of two"]
SHARDED = {"gather_outputs_megabytes": 0, "tile": 8}


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("world", "tokens"), [(2, 96), (3, 95), (4, 128)])
@pytest.mark.parametrize("kind", LATER)
@on_ranks("world")
def test_values_and_gradients(kind, world, tokens, layout):
    options = SHARDED | {"layout": layout, "strategy": "ring"}
    types, tiles, (later,) = run(kind, tokens, options)
    assert types == [DTensor] * 3
    assert later.endswith(f"[2, {tokens}, {WORDS}]")
    assert any(x.gradients_at_once for x in tiles)


@pytest.mark.parametrize("kind", ["along tokens", "alone", "autocast inside", "plain"])
@on_ranks(2)
def test_results_that_stay(kind):
    """What is not made by token, what nothing else reads, and what is gathered.

    Nor what is computed under another autocast than there is after the program.
    """
    options = {"tile": 8} if kind == "plain" else SHARDED
    if kind == "plain":
        options |= {"gather_outputs_megabytes": math.inf}
    assert run(kind, 96, options)[2] == []


@pytest.mark.timeout(240)
@on_ranks(2, timeout=230)
def test_with_inductor():
    assert len(run("plain", 96, SHARDED | {"inner": "inductor"})[2]) == 1


class OfHidden(Model):
    """Takes what the embedding makes."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (6, -1)).transpose(1, 2).chunk(3, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(x + y.transpose(1, 2).flatten(2))
        return logits.logsumexp(-1).sum(), logits


@on_ranks(2)
def test_results_of_inputs_in_a_layout_are_in_natural_order():
    with default_dtype(torch.float64):
        model, x = OfHidden("plain"), torch.randn(2, 40, CHANNELS)
        wanted = step(model, model, x, "logits")
        given = cp.shard(x, sequence_mesh(2), 1, layout="zigzag")
        options = {"inner": "aot_eager", "tile": 4, "strategy": "ring"}
        with config.patch(tile_least_megabytes=1e-3), recording() as reports:
            compiled = torch.compile(model, backend="cp", options=options)
            got = step(compiled, model, given, "logits")
            assert is_marked(compiled(given)[1]), "its layout is known to be natural"
    assert_close(got, wanted, rtol=1e-9, atol=1e-10)
    later = [name for report in reports for name in report.later]
    assert later == 2 * [f"logits [2, 40, {WORDS}]"]


@on_ranks(2)
def test_gradients_that_ddp_averages():
    """Afterwards, also those that come from the logits."""
    with default_dtype(torch.float64):
        model, ids = Model("plain"), torch.randint(WORDS, (2, 96))
        model.scale.requires_grad_(False)  # it is not used
        wanted = step(model, model, ids, "both")
        averaged = nn.parallel.DistributedDataParallel(model)
        options, settings = split(SHARDED)
        with settings, config.patch(tile_least_megabytes=1e-3), recording() as reports:
            compiled = compiled_on(2, averaged, **options)
            got = step(compiled, model, ids, "both")
    assert_close(got, wanted, rtol=1e-9, atol=1e-10)
    later = [name for report in reports for name in report.later]
    assert later == [f"logits [2, 96, {WORDS}]"]
