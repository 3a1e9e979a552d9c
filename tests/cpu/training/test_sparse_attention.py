"""Keys that a small network chooses: exact, by rows, and nothing sent but its keys.

Against one process in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cpcompile.accounting.graph_account import Kind, Purpose
from cpcompile.reporting.graph_report import recording
from tests.cpu.against_one_process import Comparison, compare
from tests.cpu.attention_cases import sequence_mesh
from tests.support.sparse_attention import MODULES, WIDTH

FLOAT64 = 8  # bytes
KEYS = 8  # channels of a key of the indexer


class Checkpointed(nn.Module):
    """A module that is computed again in the backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.module, x, use_reentrant=False)
        return y


def compared(name: str, shape: tuple[int, int], world: int, how: str) -> Comparison:
    """A comparison with one process; `how`: a door, "checkpoint", "inductor"."""
    make = MODULES[name]
    options: dict[str, Any] = {"shard": {"x": 1}} if how != "dtensor" else {}
    if how == "inductor":
        options["inner"] = "inductor"
    door = "dtensor" if how == "dtensor" else "plain"
    again = (lambda: Checkpointed(make())) if how == "checkpoint" else make
    return compare(again, (*shape, WIDTH), world, door, **options)


CASES = [
    (name, world, batch, tokens, how)
    for name in MODULES
    for world, batch, tokens in ((2, 2, 37), (3, 1, 41), (2, 1, 32), (3, 2, 41))
    for how in ("plain", "dtensor", "checkpoint", "inductor")
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "world", "batch", "tokens", "how"), CASES)
def test_it_equals_one_process(pools, name, world, batch, tokens, how):
    arguments = (name, (batch, tokens), world, how)
    for comparison in pools[world].run(compared, *arguments, timeout=200):
        comparison.check()
        # Of layouts that another test of these processes has used.
        others = [x for x in comparison.warnings if "takes tokens in order" not in x]
        assert others == []


def exchanged(name: str, batch: int, tokens: int, world: int) -> dict[str, Any]:
    """What a training step exchanges, and the masks of its calls."""
    torch._dynamo.reset()
    options = {"mesh": sequence_mesh(world), "inner": "aot_eager", "shard": {"x": 1}}
    model = MODULES[name]().double()
    call = torch.compile(model, backend="cp", options=options)
    x = torch.randn(batch, tokens, WIDTH, dtype=torch.float64).requires_grad_()
    with recording() as reports:
        call(x)
    found = [x for r in reports for a in r.accounts for x in a.exchanges]
    return {
        "gathered": sum(
            x.bytes
            for x in found
            if (x.kind, x.purpose) == (Kind.ALL_GATHER, Purpose.VALUE)
        ),
        "mixers": sum(x.bytes for x in found if x.purpose is Purpose.MIXER),
        "masks": [call.mask for report in reports for call in report.calls],
    }


@pytest.mark.parametrize("name", ["heads", "einsum", "blocks", "compressed"])
def test_keys_of_the_indexer_are_all_that_is_gathered(pools, name):
    batch, tokens, world = 2, 38, 2
    for found in pools[world].run(exchanged, name, batch, tokens, world):
        keys = tokens if name in ("heads", "einsum") else tokens // 4
        mine = -(-keys // world)
        whole = batch * keys * KEYS * FLOAT64
        assert found["mixers"] == 0
        assert all(mask.endswith(", by rows") for mask in found["masks"])
        assert found["gathered"] <= whole * mine / keys
