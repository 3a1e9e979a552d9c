"""Runs a model through AOTAutograd, its repeated blocks folded, without a compiler."""

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
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V

from cpcompile.passes.local.folding.fold_repeated_blocks import (
    FoldedBlocks,
    find_blocks,
    fold_repeated_blocks,
)


@dataclass
class Folded:
    """A model that runs folded; of its forward, then of its backward graph.

    blocks: what was folded. modules: the graphs.
    """

    call: Callable[..., Any]
    blocks: list[list[FoldedBlocks]] = field(default_factory=list)
    modules: list[fx.GraphModule] = field(default_factory=list)

    @property
    def counts(self) -> list[list[int]]:
        """Of blocks, in every row of both graphs."""
        return [[row.count for row in rows] for rows in self.blocks]


def folded(model: nn.Module, fold: bool = True, dynamic: bool = False) -> Folded:
    """`model`, whose graphs are those that Inductor gets."""
    found = Folded(model)

    def compiler(module: fx.GraphModule, inputs: Any) -> Any:
        rows = find_blocks(module.graph) if fold else []
        found.blocks.append([FoldedBlocks.of(row) for row in rows])
        fold_repeated_blocks(module.graph, rows)
        module.recompile()
        found.modules.append(module)
        return boxed_nop(module, inputs)

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        values = [x.meta["val"] for x in joint.graph.find_nodes(op="placeholder")]
        with V.set_fake_mode(detect_fake_mode(values)):
            joint_graph_passes(joint)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    found.call = torch.compile(model, backend=backend, dynamic=dynamic)
    return found
