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
from tests.cpu.attention_cases import sequence_mesh
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


def run(kind: str, tokens: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    steps = []
    with default_dtype(torch.float64):
        model, ids = Model(kind), torch.randint(WORDS, (2, tokens))
        mesh = sequence_mesh(torch.distributed.get_world_size())
        options, settings = split({"mesh": mesh, "inner": "aot_eager", **options})
        with settings, config.patch(tile_least_megabytes=1e-3), recording() as reports:
            compiled = torch.compile(model, backend="cp", options=options)
            for uses in ("loss", "both", "logits"):
                got, kinds = step(compiled, model, ids, uses), type(compiled(ids)[-1])
                wanted = step(model, model, ids, uses)
                assert_close(got, wanted, rtol=1e-9, atol=1e-10)
                steps.append(kinds)
        with torch.no_grad():
            assert_close(plain(compiled(ids)[-1]), model(ids)[-1])
    tiles = [tile for report in reports for tile in report.tiles]
    later = sorted({name for report in reports for name in report.later})
    return {"types": steps, "tiles": tiles, "later": later}


LATER = ["plain", "tied", "capped", "weight made of two"]
SHARDED = {"gather_outputs_megabytes": 0, "tile": 8}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("world", "tokens"), [(2, 96), (3, 95), (4, 128)])
@pytest.mark.parametrize("kind", LATER)
def test_values_and_gradients(pools, kind, world, tokens, layout):
    options = SHARDED | {"layout": layout, "strategy": "ring"}
    for found in pools[world].run(run, kind, tokens, options, timeout=110):
        assert found["types"] == [DTensor] * 3
        (later,) = found["later"]
        assert later.endswith(f"[2, {tokens}, {WORDS}]")
        assert any(x.gradients_at_once for x in found["tiles"])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["along tokens", "alone", "autocast inside", "plain"])
def test_results_that_stay(pools, kind):
    """What is not made by token, what nothing else reads, and what is gathered.

    Nor what is computed under another autocast than there is after the program.
    """
    options = {"tile": 8} if kind == "plain" else SHARDED
    if kind == "plain":
        options |= {"gather_outputs_megabytes": math.inf}
    for found in pools[2].run(run, kind, 96, options, timeout=110):
        assert found["later"] == []


@pytest.mark.timeout(240)
def test_with_inductor(pools):
    options = SHARDED | {"inner": "inductor"}
    for found in pools[2].run(run, "plain", 96, options, timeout=230):
        assert len(found["later"]) == 1


class OfHidden(Model):
    """Takes what the embedding makes."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (6, -1)).transpose(1, 2).chunk(3, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(x + y.transpose(1, 2).flatten(2))
        return logits.logsumexp(-1).sum(), logits


def given_laid_out() -> list[str]:
    torch._dynamo.reset()
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        model, x = OfHidden("plain"), torch.randn(2, 40, CHANNELS)
        wanted = step(model, model, x, "logits")
        given = cp.shard(x, sequence_mesh(2), 1, layout="zigzag")
        options = {"inner": "aot_eager", "tile": 4, "strategy": "ring"}
        with config.patch(tile_least_megabytes=1e-3), recording() as reports:
            compiled = torch.compile(model, backend="cp", options=options)
            got = step(compiled, model, given, "logits")
            assert is_marked(compiled(given)[1]), "its layout is known to be natural"
    assert_close(got, wanted, rtol=1e-9, atol=1e-10)
    return [name for report in reports for name in report.later]


@pytest.mark.timeout(90)
def test_results_of_inputs_in_a_layout_are_in_natural_order(pools):
    for later in pools[2].run(given_laid_out, timeout=80):
        assert later == 2 * [f"logits [2, 40, {WORDS}]"]


def under_ddp() -> list[str]:
    """DDP averages gradients afterwards, also those that come from the logits."""
    torch._dynamo.reset()
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        model, ids = Model("plain"), torch.randint(WORDS, (2, 96))
        model.scale.requires_grad_(False)  # it is not used
        wanted = step(model, model, ids, "both")
        mesh = sequence_mesh(2)
        ddp = nn.parallel.DistributedDataParallel
        averaged = ddp(model, process_group=mesh.get_group())
        options, settings = split({"mesh": mesh, "inner": "aot_eager"} | SHARDED)
        with settings, config.patch(tile_least_megabytes=1e-3), recording() as reports:
            compiled = torch.compile(averaged, backend="cp", options=options)
            got = step(compiled, model, ids, "both")
    assert_close(got, wanted, rtol=1e-9, atol=1e-10)
    return [name for report in reports for name in report.later]


@pytest.mark.timeout(90)
def test_gradients_that_ddp_averages(pools):
    for later in pools[2].run(under_ddp, timeout=80):
        assert later == [f"logits [2, 96, {WORDS}]"]
