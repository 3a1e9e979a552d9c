"""Runs a graph of P tokens, in one process, where the padding has any numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.frontend.padding.pad_graph import pad_graph
from cpcompile.frontend.symbolic_sizes import specialize_sizes
from cpcompile.passes.graph.context import Context
from cpcompile.passes.graph.nodes import fake_value
from cpcompile.passes.model.lengths.pad_tokens import pad_tokens

RANKS = 8
S = 13  # of which 16 are made
DIM = 1  # the dimension of tokens of every input


class Padded:
    """A function, compiled for S tokens and run on P."""

    def __init__(self, fn: Callable[..., Any], *inputs: Tensor) -> None:
        torch._dynamo.reset()
        self.fixes, self.junk = 0, math.nan
        self.text = ""
        self.run: Any = None
        for x in inputs:
            torch._dynamo.mark_dynamic(x, DIM)
        torch.compile(fn, backend=self._backend, fullgraph=True)(*inputs)

    def _backend(self, gm: fx.GraphModule, _: Any) -> Any:
        graph = fx.Graph()
        graph.output(graph.graph_copy(gm.graph, {}))
        module = fx.GraphModule(gm, graph)
        lengths = [fake_value(x).shape[DIM] for x in _tensors(module)]
        length = next(n for n in lengths if isinstance(n, torch.SymInt))
        specialize_sizes(module.graph, length)
        padding, around = pad_graph(module.graph, length, RANKS, "cpu")
        ctx = Context(mesh=None, axis=0, inputs={}, profile=None, padding=padding)
        self.fixes = pad_tokens(module.graph, ctx)
        module.graph.lint()
        module.recompile()
        self.text = module.code
        placeholders = module.graph.find_nodes(op="placeholder")
        names = [x.name for x in placeholders]
        self._given = [_giver(x) for x in placeholders if "grapharg" in x.meta]
        ctx.findings.outputs = [None] * len(ctx.findings.padded_results)

        def filled(*given: Any) -> Any:
            """Junk in place of the last token that was repeated."""
            real = int(given[names.index("cp_real_length")])
            return module(*(self._junk(x, real) for x in given))

        self.run = around(filled, ctx)
        return gm

    def __call__(self, *inputs: Tensor) -> Any:
        """What the padded program gives for the arguments of the function."""
        (result,) = self.results(*inputs)
        return result

    def results(self, *inputs: Tensor) -> tuple[Any, ...]:
        """All of them."""
        return self.run(*(x(inputs) for x in self._given))  # type: ignore[no-any-return]

    def _junk(self, x: Any, real: int) -> Any:
        """Numbers of the caller, or those that were there before in another order."""
        if not isinstance(x, Tensor) or x.dim() <= DIM or x.shape[DIM] % RANKS:
            return x
        mine = torch.arange(x.shape[DIM]) < real
        mine = mine.reshape(-1, *[1] * (x.dim() - DIM - 1))
        return torch.where(mine, x, self.junk if x.is_floating_point() else x.flip(DIM))


def _giver(node: fx.Node) -> Callable[[Any], Any]:
    """What an input of the graph is, by the arguments of the function."""
    argument = node.meta["grapharg"]
    name = re.fullmatch(r"L\['(\w+)'\]", argument.source.name)
    if name is not None:
        index = 0 if name[1] == "x" else 1
        return lambda inputs: inputs[index]
    if not isinstance(argument.example, Tensor):
        return lambda inputs: inputs[0].shape[DIM]
    return lambda inputs: argument.example


def _tensors(module: fx.GraphModule) -> list[fx.Node]:
    inputs = module.graph.find_nodes(op="placeholder")
    return [x for x in inputs if isinstance(fake_value(x), Tensor)]
