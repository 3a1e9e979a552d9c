"""Keys that every rank makes of latents: exact, and nothing sent but these.

Against one process in float64.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from cpcompile.accounting.graph_account import GraphDirection, Kind, Purpose
from cpcompile.reporting.graph_report import recording
from tests.cpu.against_one_process import (
    Checkpointed,
    Comparison,
    compare,
    compare_calls,
    hidden_states,
)
from tests.cpu.attention_cases import compiled_on
from tests.cpu.on_ranks import on_ranks
from tests.support.latent_attention import LATENT, ROPE, WIDTH, TwoLayers

FLOAT64 = 8  # bytes


# How parts of a key are joined, and what a query sees.
MODULES = {
    "causal": ("cat", "causal"),
    "writes": ("writes", "none"),
    "documents": ("cat", "documents"),
}


CASES = [
    (name, world, batch, tokens, layout, how)
    for name in MODULES
    for world, batch, tokens in ((2, 2, 37), (3, 1, 41), (2, 1, 32))
    for layout in ("contiguous", "zigzag")
    for how in ("plain", "dtensor", "checkpoint", "inductor")
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("module", "world", "batch", "tokens", "layout", "how"), CASES)
@on_ranks("world", timeout=200)
def test_it_equals_one_process(module, world, batch, tokens, layout, how):
    def make() -> nn.Module:
        model = TwoLayers(*MODULES[module])
        return Checkpointed(model) if how == "checkpoint" else model

    options = {"strategy": "latents", "layout": layout}
    options["inner"] = "inductor" if how == "inductor" else "aot_eager"
    door = "dtensor" if how == "dtensor" else "plain"
    comparison = compare(make, (batch, tokens, WIDTH), world, door, **options)
    comparison.check()
    # Of layouts that another test of these processes has used.
    assert all("takes tokens in order" in x for x in comparison.warnings)


@pytest.mark.parametrize("lengths", [(32, 40, 48), (33, 41)])
@on_ranks(2)
def test_one_program_for_many_lengths(lengths):
    calls = [hidden_states(n, WIDTH) for n in lengths]
    options = {"strategy": "latents", "dynamic": True}
    compare_calls(TwoLayers().double(), calls, 2, **options).check()


@pytest.mark.parametrize("how", ["plain", "checkpoint"])
@on_ranks(2)
def test_latents_are_all_that_is_sent(how):
    batch, tokens, world = 2, 40, 2
    layers, rows = 2, batch * (tokens // world)
    model = Checkpointed(TwoLayers()) if how == "checkpoint" else TwoLayers()
    call = compiled_on(2, model.double(), strategy="latents")
    held: list[Tensor] = []

    def hold(x: Tensor) -> Tensor:
        held.append(x)
        return x

    saving = torch.autograd.graph.saved_tensors_hooks(hold, hold)
    with recording() as reports, saving:
        call(*hidden_states(tokens, WIDTH))
    sent: Counter[tuple[GraphDirection, Kind]] = Counter()
    for e in Comparison([], [], reports).exchanges:
        if e.purpose is Purpose.ATTENTION:
            sent[e.direction, e.kind] += e.bytes
        elif e.purpose is Purpose.VALUE:  # x or the result, whole outside
            assert e.bytes == rows * WIDTH * FLOAT64
    backward, gathers = GraphDirection.BACKWARD, Kind.ALL_GATHER
    wanted = (GraphDirection.FORWARD, gathers), (backward, gathers)
    each = layers * rows * (LATENT + ROPE) * FLOAT64
    assert sent == dict.fromkeys((*wanted, (backward, Kind.REDUCE_SCATTER)), each)
    texts = (call.latent_source for report in reports for call in report.calls)
    assert all(text.endswith("of their bytes") for text in texts)
    # Nothing as wide as keys of all tokens lives until the backward.
    assert max(x.numel() for x in held) <= rows * WIDTH * 4
