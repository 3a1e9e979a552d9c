"""Autograd functions that write, and fused losses, equal one process."""

import pytest
import torch

from tests.cpu.against_one_process import compare_calls
from tests.cpu.on_ranks import on_ranks
from tests.support.fused_losses import GATHERED, LOSSES, WRITES, Model, batch

# One of each mechanism; tests/golden/sharding reads the graphs of others.
SOME_WRITES = ("columns", "rows", "backward rows")
SOME_LOSSES = ("scatter_add_", "index_put")


CASES = [
    (world, length, options, kinds)
    for world, length, options in (
        (2, 16, {}),
        (3, 24, {"layout": "zigzag"}),
        (2, 16, {"strict": False}),
        (3, 23, {}),
    )
    for kinds in ("some", "writes", "losses")
] + [(2, 16, {"inner": "inductor"}, "compiled")]
KINDS = {
    "some": SOME_WRITES + SOME_LOSSES,
    "writes": tuple(WRITES),
    "losses": tuple(LOSSES),
    "compiled": ("rows", "index_put_", "backward rows", "scatter_add_", "cat"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "length", "options", "kinds"), CASES)
@on_ranks("world", timeout=290)
def test_functions(world, length, options, kinds):
    for kind in KINDS[kinds]:
        torch.manual_seed(0)
        model = Model(kind if kind in WRITES else LOSSES[kind]).double()
        found = compare_calls(model, [batch(length)], world, **options)
        found.check()
        gathered = [x for x in found.warnings if "on gathered tensors" in x]
        if length % world == 0 and kind in LOSSES:
            assert bool(gathered) == (kind in GATHERED), (kind, gathered)
