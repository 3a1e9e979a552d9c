"""Keys that every rank makes of latents: exact, and nothing sent but these.

Against one process in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cpcompile.accounting.graph_account import GraphDirection, Kind, Purpose
from cpcompile.reporting.graph_report import recording
from tests.cpu.against_one_process import Comparison, compare, run
from tests.cpu.attention_cases import sequence_mesh
from tests.support.bounds import deviations
from tests.support.latent_attention import LATENT, ROPE, WIDTH, TwoLayers

FLOAT64 = 8  # bytes


class Checkpointed(nn.Module):
    """A module whose layers are computed again in the backward."""

    def __init__(self, module: TwoLayers) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.module.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


# How parts of a key are joined, and what a query sees.
MODULES = {
    "causal": ("cat", "causal"),
    "writes": ("writes", "none"),
    "documents": ("cat", "documents"),
}


def compared(
    name: str, shape: tuple[int, int], world: int, how: str, layout: str
) -> Comparison:
    """A comparison with one process; `how`: a door, "checkpoint", "inductor"."""
    options: dict[str, Any] = {"strategy": "latents", "layout": layout}
    if how == "inductor":
        options["inner"] = "inductor"
    door = "dtensor" if how == "dtensor" else "plain"

    def make() -> nn.Module:
        model = TwoLayers(*MODULES[name])
        return Checkpointed(model) if how == "checkpoint" else model

    return compare(make, (*shape, WIDTH), world, door, **options)


CASES = [
    (name, world, batch, tokens, layout, how)
    for name in MODULES
    for world, batch, tokens in ((2, 2, 37), (3, 1, 41), (2, 1, 32))
    for layout in ("contiguous", "zigzag")
    for how in ("plain", "dtensor", "checkpoint", "inductor")
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("module", "world", "batch", "tokens", "layout", "how"), CASES)
def test_it_equals_one_process(pools, module, world, batch, tokens, layout, how):
    arguments = (module, (batch, tokens), world, how, layout)
    for comparison in pools[world].run(compared, *arguments, timeout=200):
        comparison.check()
        # Of layouts that another test of these processes has used.
        others = [x for x in comparison.warnings if "takes tokens in order" not in x]
        assert others == []


def lengths(tokens: tuple[int, ...], world: int) -> list[Comparison]:
    """Comparisons for one length after another, of which Dynamo makes a symbol."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = TwoLayers().double()
    mesh = sequence_mesh(world)
    options = {"mesh": mesh, "inner": "aot_eager", "strategy": "latents"}
    call = torch.compile(model, backend="cp", dynamic=True, options=options)
    found = []
    for n in tokens:
        x = torch.randn(2, n, WIDTH, dtype=torch.float64)
        wanted = run(model, x.clone().requires_grad_(), model)
        found.append(
            Comparison(deviations(run(call, x.requires_grad_(), model), wanted), [])
        )
    return found


@pytest.mark.parametrize("tokens", [(32, 40, 48), (33, 41)])
def test_one_program_for_many_lengths(pools, tokens):
    for comparisons in pools[2].run(lengths, tokens, 2, timeout=100):
        for comparison in comparisons:
            comparison.check()


def exchanged(how: str, batch: int, tokens: int, world: int) -> dict[str, Any]:
    """What a training step receives for attention, and what it saves."""
    torch._dynamo.reset()
    options = {
        "mesh": sequence_mesh(world), "inner": "aot_eager", "strategy": "latents",
    }  # fmt: skip
    model: nn.Module = TwoLayers()
    if how == "checkpoint":
        model = Checkpointed(model)  # type: ignore[arg-type]
    call = torch.compile(model.double(), backend="cp", options=options)
    x = torch.randn(batch, tokens, WIDTH, dtype=torch.float64).requires_grad_()
    held: list[Tensor] = []

    def hold(x: Tensor) -> Tensor:
        held.append(x)
        return x

    with recording() as reports, torch.autograd.graph.saved_tensors_hooks(hold, hold):
        call(x)
    found: dict[Any, int] = {}
    for report in reports:
        for account in report.accounts:
            for e in account.exchanges:
                if e.purpose is Purpose.ATTENTION:
                    key = (e.direction, e.kind)
                    found[key] = found.get(key, 0) + e.bytes
                elif e.purpose is Purpose.VALUE:  # x or the result, whole outside
                    assert e.bytes == batch * tokens // world * WIDTH * FLOAT64
    texts = [call.made_of for report in reports for call in report.calls]
    return {"bytes": found, "widest": max(x.numel() for x in held), "texts": texts}


@pytest.mark.parametrize("how", ["plain", "checkpoint"])
def test_latents_are_all_that_is_sent(pools, how):
    batch, tokens, world = 2, 40, 2
    for found in pools[world].run(exchanged, how, batch, tokens, world):
        layers, rows = 2, batch * (tokens // world)
        each = layers * rows * (LATENT + ROPE) * FLOAT64
        forward, backward = GraphDirection.FORWARD, GraphDirection.BACKWARD
        assert found["bytes"] == {
            (forward, Kind.ALL_GATHER): each,
            (backward, Kind.ALL_GATHER): each,
            (backward, Kind.REDUCE_SCATTER): each,
        }
        assert all(text.endswith("of their bytes") for text in found["texts"])
        # Nothing as wide as keys of all tokens lives until the backward.
        assert found["widest"] <= rows * WIDTH * 4
