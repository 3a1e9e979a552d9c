"""Graphs as text: names of arguments, defaults, indices, and what is left out."""

import operator

import torch
import torch.fx as fx
import torch.nn as nn
from expecttest import assert_expected_inline

import cpcompile.ops  # noqa: F401  (it registers torch.ops.cp)
from cpcompile.passes.graph.nodes import module_path
from cpcompile.passes.graph.readable import readable

aten, cp = torch.ops.aten, torch.ops.cp


def test_nodes_that_are_left_out():
    """Their users name what is after them."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    split = graph.call_function(aten.split.Tensor, (x, 4))
    part = graph.call_function(operator.getitem, (split, 1))
    view = graph.call_function(aten.view.default, (part, [2, 2]))
    relu = graph.call_function(aten.relu.default, (view,))
    graph.output((relu, view, split))
    hidden = (operator.getitem, aten.view.default)
    assert_expected_inline(
        readable(graph, lambda node: node.target in hidden),
        """\
x = input
split_tensor = aten.split.Tensor(x, split_size=4)
relu_default = aten.relu(split_tensor[1])
return (relu_default, split_tensor[1], split_tensor)""",
    )
    assert len(readable(graph).splitlines()) == 6


class Getting(nn.Module):
    """A module with a __getattr__ of its own, as those of diffusers have."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2))])

    def __getattr__(self, name):
        return super().__getattr__(name)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_module_with_a_getattr_of_its_own():
    paths = []

    def backend(gm, _):
        calls = gm.graph.find_nodes(op="call_function", target=nn.functional.linear)
        paths.extend(map(module_path, calls))
        return gm

    torch._dynamo.reset()
    torch.compile(Getting(), backend=backend)(torch.ones(1, 2))
    assert paths == ["blocks.0.0"]
