"""The compilers behind the passes, which run a graph of local tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch._functorch.config as functorch_config
import torch.fx as fx

from cpcompile.options import Options
from cpcompile.passes.tiling.eager_tiles import aot_eager
from cpcompile.passes.tiling.tile_tokens import NO_TILES, Tiling
from cpcompile.progress import phase
from cpcompile.torch_patches import tracing


def compile_inner(
    gm: fx.GraphModule,
    inputs: list[Any],
    options: Options,
    mode: str | None,
    tiling: Tiling = NO_TILES,
) -> Callable[..., Any]:
    """Compile a rewritten graph with the compiler that `options` name."""
    phase("AOTAutograd, forward and backward")
    # AOTAutograd's cache reads the graph's text; our calls hold a mesh it cannot see.
    with (
        tracing.plain_means_replicated(),
        # The backward is compiled here and now, under these settings, not when it runs.
        functorch_config.patch(
            enable_autograd_cache=False, force_non_lazy_backward_lowering=True
        ),
    ):
        if options.inner == "aot_eager":
            return aot_eager(gm, inputs, tiling)
        from cpcompile.inductor.compile_local import (
            compile_local,  # Inductor is slow to import
        )

        return compile_local(gm, inputs, options.unroll, mode, tiling)
