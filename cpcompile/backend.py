"""The backend that torch.compile(model, backend="cp") calls with each Dynamo graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.fx as fx

import cpcompile.ops  # noqa: F401  (DTensor attention must work while Dynamo traces)
from cpcompile.compile.assembly import CompiledCallable
from cpcompile.compile.attempts import Attempts
from cpcompile.compile.inner_compilers import compile_inner
from cpcompile.errors import InputError
from cpcompile.frontend.arguments import Frame
from cpcompile.frontend.changing_floats import floats_are_tensors
from cpcompile.frontend.interpreter_state import gc_paused, with_large_stack
from cpcompile.frontend.request import agreed_request
from cpcompile.logs import warn_unsharded
from cpcompile.ops.mixers.keep_mixers import is_known, keep
from cpcompile.options import Options, parse_options
from cpcompile.passes.whole.program_outputs import keep_named
from cpcompile.progress import compiling
from cpcompile.ranks import heartbeat
from cpcompile.settings import setting
from cpcompile.torch_patches import (
    dead_collectives,
    fixed_rules,
    graph_breaks,
    kept_mixers,
    local_memory,
    missing_gradients,
    saved_values,
    sent_values,
    shard_placements,
    skipped_frames,
    symbolic_tracing,
    symbols_in_dynamo,
    traced_handlers,
    tracing,
    unbroken_graphs,
    whole_ddp_graphs,
)
from cpcompile.torch_private.dynamo import compiled_autograd

unbroken_graphs.keep_encoders()
traced_handlers.install()
dead_collectives.install()
fixed_rules.install()
missing_gradients.install()
sent_values.keep_nan()
saved_values.install()
skipped_frames.install()
graph_breaks.install()
unbroken_graphs.keep_leaves()
kept_mixers.install(is_known, keep)
shard_placements.install()
symbolic_tracing.install()
symbols_in_dynamo.install()
sent_values.install()
whole_ddp_graphs.install()
tracing.install()  # before Dynamo traces, which is before any backend is called

heartbeat.announce()  # so that a rank that ends before it compiles anything is missed


def cp(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
    **internal: bool,
) -> CompiledCallable:
    """Compile one Dynamo graph for context parallelism.

    Args:
        gm: the graph, of the whole sequence.
        example_inputs: its inputs, fake or real.
        options: see `cpcompile.options.Options`.
        mode: of `torch.compile(mode=...)`.
        internal: see `cpcompile.options.parse_options`.

    Raises: OptionError, InputError, RankMismatchError; RewriteError if strict.
    """
    if compiled_autograd.in_compiled_autograd_region:
        # The backward of what is compiled already: its tensors are local ones.
        return compile_inner(gm, list(example_inputs), parse_options(options, mode))
    with (
        gc_paused(),
        tracing.backend_runs(),
        local_memory.copied_if_need_be(),
        shard_placements.plans_are_kept(),
        compiled_autograd._disable(),  # it would compile what passes try
    ):
        frame = Frame.current()
        with compiling(frame.name):
            if whole_ddp_graphs.is_piece(gm):
                _refuse_piece(frame, parsed := parse_options(options, mode))
                return compile_inner(gm, list(example_inputs), parsed)
            request = agreed_request(gm.graph, options, frame, mode, **internal)
            named = setting("outputs")
            spread = keep_named(gm, named) if named is not None else None
            if isinstance(request, Options):  # nothing is sharded
                compiled = with_large_stack(
                    lambda: compile_inner(gm, list(example_inputs), request)
                )
            else:
                if frame.code is not None:
                    skipped_frames.sharded[frame.code] = request.options.strict
                attempts = Attempts(gm, example_inputs, request, frame)
                with floats_are_tensors():
                    compiled = with_large_stack(attempts.compile)
            return compiled if spread is None else lambda *x: spread(compiled(*x))


def _refuse_piece(frame: Frame, options: Options) -> None:
    """Raise InputError for a piece of a graph, or, if not strict, warn."""
    text = (
        "a piece of a graph that DDPOptimizer has cut for DDP, because the backend is "
        'not "cp" itself; needed the whole: torch.compile(..., backend="cp"), or '
        "torch._dynamo.config.optimize_ddp = False"
    )
    if options.strict:
        raise InputError(f"{frame.name} is {text}")
    warn_unsharded(frame.name, f"it is {text}")
