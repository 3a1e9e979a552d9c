"""The module that a call belongs to, as messages and reports name it."""

import torch
import torch.nn as nn

from cpcompile.passes.graph.nodes import module_path


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
