"""Compile a graph whose parallelism is decided, by the compiler after AOTAutograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.fx as fx

from cpcompile.accounting.read import Accounting
from cpcompile.compile.capture import decompositions, traces_whole
from cpcompile.compile.no_computation import returns_zeros
from cpcompile.options import Options
from cpcompile.passes.joint.saving.save_by_budget import SavingBudget, save_by_budget
from cpcompile.passes.joint.tiling.tile_tokens import NO_TILES, Tiling
from cpcompile.passes.local.folding.folding_options import Folding
from cpcompile.passes.pipeline import JOINT, WHOLE, run_passes
from cpcompile.passes.whole.edges import Edges
from cpcompile.passes.whole.localise import WholeProgram
from cpcompile.progress import phase
from cpcompile.torch_patches import saved_values, tracing
from cpcompile.torch_private.dynamo import (
    aot_autograd,
    boxed_nop,
    functorch_config,
    min_cut_rematerialization_partition,
)

GraphReader = Callable[[fx.GraphModule, bool], None]


def compile_inner(
    gm: fx.GraphModule,
    inputs: list[Any],
    options: Options,
    tiling: Tiling = NO_TILES,
    saving: SavingBudget | None = None,
    folding: Folding | None = None,
    accounting: Accounting | None = None,
    cache: Mapping[str, bool] | None = None,
    edges: Edges | None = None,
) -> Callable[..., Any]:
    """Compile forward and backward of `gm`.

    Args:
        inputs: local ones, fake or real.
        tiling: what runs tile by tile. saving: what the forward may save, if limited.
        folding: whether blocks that repeat become one function.
        accounting: what reads the graphs as they are compiled.
        cache: settings of AOTAutograd's cache, if it is to be used: by itself it makes
            no key of calls that hold a mesh.

    Raises: RingOverlapError; OptionError for a budget that cannot be met.
    """
    choose = None if saving is None else lambda torchs: save_by_budget(torchs, saving)
    settings: dict[str, Any] = {
        "enable_autograd_cache": False,
        "force_non_lazy_backward_lowering": True,
    } | dict(cache or {})
    if saving is not None and saving.offload:
        settings["enable_activation_offloading"] = True
    accounting = accounting or Accounting()
    phase("AOTAutograd, forward and backward")
    with (
        traces_whole(edges),
        tracing.plain_means_replicated(),
        saved_values.chosen_by(choose),
        accounting.tracing(),
        # The backward is compiled here and now, under these settings, not when it runs.
        functorch_config.patch(settings),
    ):
        if options.inner == "aot_eager":
            return _aot_eager(
                gm, inputs, tiling, accounting.read, options.computes, edges
            )
        from cpcompile.compile.compile_local import (
            compile_local,  # Inductor is slow to import
        )

        return compile_local(
            gm, inputs, options.mode, tiling, folding, accounting, edges
        )


def _aot_eager(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    tiling: Tiling,
    read: GraphReader = lambda module, is_backward: None,
    runs: bool = True,
    edges: Edges | None = None,
) -> Callable[..., Any]:
    """Compile as torch's backend "aot_eager" does, with passes on the joint graph.

    read: gets every graph as it runs, and whether it is a backward.
    runs: whether graphs run; otherwise each returns zeros of the right shapes.
    """
    finish = boxed_nop if runs else returns_zeros

    def localised(module: fx.GraphModule) -> None:
        if edges is not None:
            run_passes(module, WHOLE, WholeProgram(edges, {}))
        run_passes(module, JOINT, tiling)

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        localised(joint)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def inference(forward: fx.GraphModule, inputs: Any) -> Any:
        localised(forward)
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
        decompositions=None if edges is None else decompositions(),
        keep_inference_input_mutations=True,
    )(gm, inputs)
    return compiled
