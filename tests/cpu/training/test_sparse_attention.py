"""Keys that a small network chooses: exact, by rows, and nothing sent but its keys.

Against one process in float64.
"""

from __future__ import annotations

import pytest

from cpcompile.accounting.graph_account import Kind, Purpose
from tests.cpu.against_one_process import Checkpointed, compare
from tests.cpu.on_ranks import on_ranks
from tests.support.sparse_attention import MODULES, WIDTH

FLOAT64 = 8  # bytes
KEYS = 8  # channels of a key of the indexer


CASES = [
    (name, world, batch, tokens, how)
    for name in MODULES
    for world, batch, tokens in ((2, 2, 37), (3, 1, 41), (2, 1, 32), (3, 2, 41))
    for how in ("plain", "dtensor", "checkpoint", "inductor")
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "world", "batch", "tokens", "how"), CASES)
@on_ranks("world", timeout=200)
def test_it_equals_one_process(name, world, batch, tokens, how):
    make = MODULES[name]
    options = {"shard": {"x": 1}} if how != "dtensor" else {}
    options["inner"] = "inductor" if how == "inductor" else "aot_eager"
    door = "dtensor" if how == "dtensor" else "plain"
    again = (lambda: Checkpointed(make())) if how == "checkpoint" else make
    comparison = compare(again, (batch, tokens, WIDTH), world, door, **options)
    comparison.check()
    # Of layouts that another test of these processes has used.
    others = [x for x in comparison.warnings if "takes tokens in order" not in x]
    assert others == []


@pytest.mark.parametrize("name", ["heads", "einsum", "blocks", "compressed"])
@on_ranks(2)
def test_keys_of_the_indexer_are_all_that_is_gathered(name):
    batch, tokens, world = 2, 38, 2
    found = compare(MODULES[name], (batch, tokens, WIDTH), world, shard={"x": 1})
    keys = tokens if name in ("heads", "einsum") else tokens // 4
    values = (Kind.ALL_GATHER, Purpose.VALUE)
    gathered = [x.bytes for x in found.exchanges if (x.kind, x.purpose) == values]
    assert sum(gathered) <= batch * -(-keys // world) * KEYS * FLOAT64
    assert not any(x.purpose is Purpose.MIXER for x in found.exchanges)
    masks = [call.mask for report in found.reports for call in report.calls]
    assert all(mask.endswith(", by rows") for mask in masks)
