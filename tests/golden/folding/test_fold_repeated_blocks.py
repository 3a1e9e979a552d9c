"""Forward graphs before and after `fold_repeated_blocks`, and twins that stay."""

import pytest
import torch
import torch.nn as nn

from cpcompile.passes.local.folding import fold_repeated_blocks
from tests.golden.golden_text import assert_golden
from tests.golden.tiling.test_tile_tokens import text
from tests.support.forms.folded_graphs import folded


class Layers(nn.Module):
    """x + f(x) W, several times."""

    def __init__(self, constants=(1.0,) * 4):
        super().__init__()
        self.constants = constants
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in constants)

    def forward(self, x):
        for layer, constant in zip(self.layers, self.constants, strict=True):
            x = x + layer(torch.relu(x).sin() + constant)
        return x


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(fold_repeated_blocks, "_LEAST_CALLS", 4)


def graphs(model, fold=True):
    found = folded(model, fold)
    with torch.no_grad():
        found.call(torch.ones(6, 8))
    return found


def test_four_layers():
    before, after = graphs(Layers(), fold=False), graphs(Layers())
    calls = text(before.modules[0].graph).splitlines()
    block = text(after.modules[0].block_0.graph).splitlines()
    assert len(calls) == 4 * (len(block) - 1) + 1
    assert_golden(
        text(after.modules[0].graph),
        """\
invoke_subgraph = invoke_subgraph(block_0, 'cp_block_0', arg0_1, arg1_1)
getitem = getitem(invoke_subgraph, 0)  # [6, 8]
invoke_subgraph_1 = invoke_subgraph(block_0, 'cp_block_0', getitem, arg2_1)
getitem_1 = getitem(invoke_subgraph_1, 0)  # [6, 8]
invoke_subgraph_2 = invoke_subgraph(block_0, 'cp_block_0', getitem_1, arg3_1)
getitem_2 = getitem(invoke_subgraph_2, 0)  # [6, 8]
invoke_subgraph_3 = invoke_subgraph(block_0, 'cp_block_0', getitem_2, arg4_1)
getitem_3 = getitem(invoke_subgraph_3, 0)  # [6, 8]
output = ((getitem_3,),)""",
    )
    assert after.counts == [[4]]


def test_blocks_that_differ_in_an_integer_stay():
    """Though it is equal: the results of x + 1 and x + 1.0 may have other dtypes."""
    assert graphs(Layers(constants=(1.0, 1.0, 1, 1.0))).counts == [[]]
