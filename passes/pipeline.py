"""The order of the passes, and the one place that runs, times and traces them.

Each tuple is for one kind of graph: Dynamo's graph, from which AOTAutograd traces
forward and backward of the whole sequence; what it traces; the same for one rank; and
the graphs that Inductor compiles for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeVar

import torch.fx as fx
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

from cpcompile.cost.plain_data import to_json
from cpcompile.progress import phase
from cpcompile.torch_private.dynamo import (
    compilation_time_metrics,
    counters,
    trace_structured,
)

from .graph.context import Context
from .graph.graph_pass import GraphPass, PassRun
from .graph.readable import readable
from .joint.record_mixers import record_mixers
from .joint.save_before_writes import save_before_writes
from .joint.tiling.sink_slices import sink_slices
from .joint.tiling.tile_tokens import Tiling, tile_tokens
from .local.expand_ring import expand_ring
from .local.folding.fold_repeated_blocks import fold_repeated_blocks
from .local.send_in_buckets import send_in_buckets
from .model.attention.choose_strategy import choose_strategy
from .model.attention.find_attention import find_attention
from .model.attention.insert_attention import insert_attention
from .model.latents.find_latents import find_latents
from .model.masks.rewrite_masks import rewrite_masks
from .model.mixers.exchange_mixers import exchange_mixers
from .model.moe.fold_moe_dispatch import fold_moe_dispatch
from .model.mutation.number_rows import number_rows
from .model.normalize.fold_kv_repeat import fold_kv_repeat
from .model.normalize.fold_scans import fold_scans
from .model.normalize.inline_attention_modules import inline_attention_modules
from .model.patterns.fold_attention_patterns import fold_attention_patterns
from .whole.begin_tokens import begin_tokens
from .whole.cut_early import cut_early
from .whole.keep_calls import keep_calls
from .whole.keep_convolutions import keep_convolutions
from .whole.keep_products import keep_products
from .whole.keep_rows import keep_rows
from .whole.leave_for_later import leave_for_later
from .whole.localise import WholeProgram, localise

log = logging.getLogger(__name__)

C = TypeVar("C")

MODEL: tuple[GraphPass[Context], ...] = (
    inline_attention_modules,  # first: its calls are to be found
    number_rows,  # before what reads the calls: torch would ask for sizes
    fold_attention_patterns,  # before what reads the calls
    find_attention,  # reads what all later passes decide on
    fold_kv_repeat,  # before choose_strategy: fewer keys may make another one best
    rewrite_masks,  # what is merely causal is planned as such
    fold_moe_dispatch,  # before find_latents: no token depends on others then
    find_latents,  # before choose_strategy, which prices what is found
    choose_strategy,  # needs nothing but the calls
    insert_attention,
    fold_scans,  # before exchange_mixers, which shares them
    exchange_mixers,
    begin_tokens,
    leave_for_later,
    keep_calls,  # last: it writes what the others mark
)

WHOLE: tuple[GraphPass[WholeProgram], ...] = (
    keep_convolutions,  # before localise: pads and cuts would each be a message
    keep_rows,  # before keep_products: it reads what rows are views of
    keep_products,  # before localise: shards are not flattened
    cut_early,  # after keep_products, whose operands are of whole dimensions
    localise,
)

JOINT: tuple[GraphPass[Tiling], ...] = (
    sink_slices,  # before tile_tokens: what is cut later is no large value any more
    tile_tokens,
    save_before_writes,
    record_mixers,  # last: what it saves is what the calls read in the end
)

# Each runs at a place of its own in Inductor's compilation, with a context of its own.
LOCAL: tuple[GraphPass[Any], ...] = (
    fold_repeated_blocks,  # before Inductor, which compiles a block once then
    expand_ring,  # before Inductor's passes, which see and move its steps
    send_in_buckets,  # after all others: what is in flight is ordered then
)


def run_passes(
    gm: fx.GraphModule, passes: Sequence[GraphPass[C]], ctx: C
) -> tuple[PassRun, ...]:
    """Run passes over `gm`, in place.

    A pass whose name, with "cp_" before it, is in
    torch._inductor.config.disabled_passes does not run.

    Raises: RewriteError (strict), or what a mistake of ours raises.
    """
    is_model = isinstance(ctx, Context)
    if is_model:
        _trace(gm.graph, "cp_before")
    runs = []
    for run in passes:
        with saved_tensors_hooks(_as_it_is, _as_it_is):
            done = _run(run, gm, ctx)
        if done is None:
            continue
        gm.graph.lint()
        counters["cpcompile"][done.name] += done.rewrites
        log.debug("%s: %d rewrites in %.3f s", done.name, done.rewrites, done.seconds)
        if done.rewrites:
            _trace(gm.graph, f"cp_{done.name}")
        runs.append(done)
    if is_model or any(run.rewrites for run in runs):
        gm.recompile()
    return tuple(runs)


def _as_it_is(x: Tensor) -> Tensor:
    """Return x; keep hooks of an outer checkpoint away from what passes try.

    The hooks of a checkpoint around the compiled module would compute the module again,
    and keep our fake tensors.
    """
    return x


def _run(run: GraphPass[C], gm: fx.GraphModule, ctx: C) -> PassRun | None:
    """Run a pass as torch runs its own: timed, with its changes to be followed.

    None if the pass is disabled.
    """
    name = f"cp_{run.__name__}"
    if isinstance(ctx, Context):  # the others run inside of longer phases
        phase(f"pass {run.__name__}")
    observer = GraphTransformObserver(gm, name)
    rewrites = observer.apply_graph_pass(lambda graph: run(graph, ctx))
    if rewrites is None:  # disabled
        return None
    return PassRun(run.__name__, rewrites, compilation_time_metrics[f"pass.{name}"][-1])


def _trace(graph: fx.Graph, name: str) -> None:
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: readable(graph),
    )


def trace_plans(ctx: Context) -> None:
    """Write every plan with its candidates as JSON: `cp_plan` in TORCH_TRACE."""
    plans = ctx.findings.plans
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "cp_plan", "encoding": "json"},
        payload_fn=lambda: to_json(
            [{"attention": call.path, "plan": plan} for call, plan in plans.items()]
        ),
    )
