"""Run AOTAutograd without a compiler after it, but with the passes on its graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx

from cpcompile.compile.no_computation import returns_zeros
from cpcompile.passes.joint.tiling.tile_tokens import Tiling
from cpcompile.passes.pipeline import JOINT, run_passes
from cpcompile.torch_private.aot_autograd import (
    aot_autograd,
    boxed_nop,
    min_cut_rematerialization_partition,
)

GraphReader = Callable[[fx.GraphModule, bool], None]


def aot_eager(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    tiling: Tiling,
    read: GraphReader = lambda module, is_backward: None,
    runs: bool = True,
) -> Callable[..., Any]:
    """Compile as torch's backend of this name does, with passes on the joint graph.

    read: gets every graph as it runs, and whether it is a backward.
    runs: whether graphs run; otherwise each returns zeros of the right shapes.
    """
    finish = boxed_nop if runs else returns_zeros

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        run_passes(joint, JOINT, tiling)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def inference(forward: fx.GraphModule, inputs: Any) -> Any:
        run_passes(forward, JOINT, tiling)
        return compile_forward(forward, inputs)

    def compile_forward(module: fx.GraphModule, inputs: Any) -> Any:
        read(module, False)
        return finish(module, inputs)

    def compile_backward(module: fx.GraphModule, inputs: Any) -> Any:
        read(module, True)
        return finish(module, inputs)

    compiled: Callable[..., Any] = aot_autograd(
        fw_compiler=compile_forward,
        bw_compiler=compile_backward,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )(gm, inputs)
    return compiled
