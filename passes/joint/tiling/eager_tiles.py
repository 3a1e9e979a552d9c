"""AOTAutograd without a compiler behind it, and with tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition

from .sink_slices import cut_early
from .tile_tokens import Tiling, tile_tokens

Read = Callable[[fx.GraphModule, bool], None]


def aot_eager(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    tiling: Tiling,
    read: Read = lambda module, is_backward: None,
) -> Callable[..., Any]:
    """As torch's backend of this name, but for `cut_early` and `tile_tokens`.

    read: gets every graph as it runs, and whether it is a backward.
    """

    def run(module: fx.GraphModule) -> None:
        if cut_early(module.graph) + tile_tokens(module.graph, tiling):
            module.recompile()

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        run(joint)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def inference(forward: fx.GraphModule, inputs: Any) -> Any:
        run(forward)
        return compile_forward(forward, inputs)

    def compile_forward(module: fx.GraphModule, inputs: Any) -> Any:
        read(module, False)
        return boxed_nop(module, inputs)

    def compile_backward(module: fx.GraphModule, inputs: Any) -> Any:
        read(module, True)
        return boxed_nop(module, inputs)

    compiled: Callable[..., Any] = aot_autograd(
        fw_compiler=compile_forward,
        bw_compiler=compile_backward,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )(gm, inputs)
    return compiled
