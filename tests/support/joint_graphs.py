"""Runs a model through AOTAutograd with `tile_tokens`, and keeps the joint graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from cpcompile.passes.joint.tiling.tile_tokens import Tiling, tile_tokens


@dataclass
class Tiled:
    """A compiled model and what was cut in it.

    before, after: the joint graph; the forward graph of a call without gradients.
    """

    call: Callable[..., Any]
    tiling: Tiling
    before: list[fx.Graph] = field(default_factory=list)
    after: list[fx.GraphModule] = field(default_factory=list)


def tiled(
    model: nn.Module,
    tile: int | None,
    decomposed: bool,
    least: int = 2**14,
    **more: Any,
) -> Tiled:
    """`model`, compiled without a compiler.

    decomposed: as for Inductor; as for aot_eager otherwise. least: bytes. more: other
    fields of Tiling.
    """
    more = {"tile_bytes": 2**16, "recompute": True, "fixed": frozenset()} | more
    found = Tiled(model, Tiling(tile, least=least, **more))

    def cut(module: fx.GraphModule) -> None:
        found.before.append(_copied(module))
        tile_tokens(module.graph, found.tiling)
        module.recompile()
        found.after.append(module)

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        cut(joint)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def inference(forward: fx.GraphModule, inputs: Any) -> Any:
        cut(forward)
        return boxed_nop(forward, inputs)

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        names = enumerate(gm.graph.find_nodes(op="placeholder"))
        # whatever module they belong to, Dynamo names them after it
        parameters = frozenset(i for i, x in names if "parameters" in x.name)
        fixed = Tiling(tile, least=least, **more | {"fixed": parameters})
        object.__setattr__(found, "tiling", fixed)
        return aot_autograd(
            fw_compiler=boxed_nop,
            bw_compiler=boxed_nop,
            inference_compiler=inference,
            partition_fn=partition,
            decompositions=select_decomp_table() if decomposed else None,
        )(gm, inputs)

    torch._dynamo.reset()
    found.call = torch.compile(model, backend=backend)
    return found


def _copied(module: fx.GraphModule) -> fx.Graph:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    return graph
