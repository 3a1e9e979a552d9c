"""Choose a strategy for every attention call that can be rewritten.

    AttentionCall  ->  Plan(chosen=ring, candidates=[ring 1.2 ms, all_gather 1.4 ms])

Sizes are global, and the time is that of the slowest rank, with the backward if there
is one. Each call has its own plan; one of a symbolic length is guarded by the interval
of lengths in which it stays the best, so that Dynamo compiles once more where that
ends. Calls that are causal or have a
mask are planned in a balanced layout too, as if it were free: order_tokens finds what
it costs. Raises RewriteError if a forced strategy is excluded, or no candidate fits the
memory budget.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection
from dataclasses import replace

import torch.fx as fx

from cpcompile.cost import crossover
from cpcompile.cost.choose import choose, rank, why_not_run
from cpcompile.cost.planner import BALANCED_LAYOUTS
from cpcompile.cost.plans import Direction, Plan, Strategy, Workload
from cpcompile.errors import RewriteError
from cpcompile.geometry.layout import Layout, leaves_ranks_empty
from cpcompile.geometry.lengths import (
    LengthNotSymbolic,
    guard_region,
    is_same,
    is_symbol,
)
from cpcompile.geometry.masks import Mask
from cpcompile.logs import warn_unmet
from cpcompile.ops.attention_spec import is_of_positions

from ...graph.context import AttentionCall, Context
from ...graph.cp_attention import dtype_in_call
from ...graph.graph_pass import graph_pass
from ...graph.nodes import fake_value
from ..masks.mask_work import NO_MASK, MaskWork, mask_work

log = logging.getLogger(__name__)

_Question = Callable[[AttentionCall, Layout], Workload]
_SYMBOLIC = "a length that is a symbol is contiguous or zigzag"


@graph_pass(
    reads=(
        "calls",
        "masks",
        "key_sources",
    ),
    writes=(
        "plans",
        "contiguous_plans",
        "balanced_plans",
    ),
)
def choose_strategy(graph: fx.Graph, ctx: Context) -> int:
    """Fill `findings.plans`; returns the number of calls that got a plan.

    Balanced layouts are taken as free here; order_tokens finds out what they cost.

    Raises: RewriteError if no strategy is possible, or not the one that is forced.
    """

    @functools.cache  # layers repeat
    def decide(question: Workload, layout: Layout = Layout.CONTIGUOUS) -> Plan:
        return choose(
            question,
            ctx.profile,
            strategy=ctx.strategy,
            degrees=ctx.degrees,
            layouts=(layout,),
            memory_budget=ctx.memory_budget,
            tie_fraction=ctx.tie_fraction,
            runnable=True,
        )

    @functools.cache  # layers share masks
    def work(mask: Mask, q_len: int, kv_len: int, layout: Layout) -> MaskWork:
        return mask_work(mask, q_len, kv_len, ctx.ranks, layout)

    def question(call: AttentionCall, layout: Layout) -> Workload:
        mask, lengths = (
            ctx.findings.masks.get(call),
            (call.q_shape[-2], call.k_shape[-2]),
        )
        work_left = NO_MASK if mask is None else work(mask, *lengths, layout)
        return workload(call, ctx, work_left)

    for call in ctx.findings.calls:
        if call.unsupported is None and call.already_local is None:
            try:
                plan = decide(question(call, Layout.CONTIGUOUS))
            except RewriteError as error:
                raise RewriteError(f"attention at {call.path}: {error}") from error
            ctx.findings.plans[call] = ctx.findings.contiguous_plans[call] = plan
            log.debug("attention at %s: %s", call.path, plan)
    ctx.findings.balanced_plans = _best_layout(ctx, question, decide)
    for call, balanced in list(ctx.findings.balanced_plans.items()):
        contiguous = ctx.findings.contiguous_plans[call]
        plan = _better(contiguous, balanced, ctx)
        if call in ctx.findings.key_sources:
            # What makes the keys is written once, for either layout.
            alike = [Strategy.LATENTS]  # or all others
            if plan.strategy is not Strategy.LATENTS:
                alike = [x for x in Strategy if x is not Strategy.LATENTS]
            both = _only(contiguous, alike), _only(balanced, alike)
            if both[0] is None or both[1] is None:
                del ctx.findings.balanced_plans[call]
                continue
            ctx.findings.contiguous_plans[call] = both[0]
            ctx.findings.balanced_plans[call] = both[1]
        ctx.findings.plans[call] = plan
    for call, plan in ctx.findings.plans.items():
        # Whether another layout is better for other lengths is not guarded.
        guard_plan(call, plan, ctx, functools.partial(decide, layout=plan.layout))
    return len(ctx.findings.plans)


def _better(contiguous: Plan, balanced: Plan, ctx: Context) -> Plan:
    """Join the plans of a call in both layouts, with the candidates of both.

    The better one is chosen, unless a layout is set: then it is the balanced one.
    """
    both = [*contiguous.candidates, *balanced.candidates]
    candidates = rank(both, ctx.tie_fraction, ctx.attention_bytes)
    chosen = balanced.chosen
    if ctx.layout is None:
        either = (contiguous.chosen, balanced.chosen)
        chosen = next(c for c in candidates if any(c is choice for choice in either))
    return replace(contiguous, chosen=chosen, candidates=candidates)


def _only(plan: Plan, strategies: Collection[Strategy]) -> Plan | None:
    """Return a plan with the best of these strategies; None if none is possible."""
    possible = (c for c in plan.candidates if c.excluded is None)
    for candidate in (plan.chosen, *possible):
        if candidate.strategy in strategies:
            return replace(plan, chosen=candidate)
    return None


def _best_layout(
    ctx: Context, question: _Question, decide: Callable[[Workload, Layout], Plan]
) -> dict[AttentionCall, Plan]:
    """Return plans in the balanced layout that is best for all calls together.

    A graph has one balanced layout, so that no layer has to change it for the next.
    """
    layouts = BALANCED_LAYOUTS if ctx.layout is None else (ctx.layout,)
    plans_by_layout = [_in_layout(ctx, layout, question, decide) for layout in layouts]

    def total(plans: dict[AttentionCall, Plan]) -> float:
        """Sum the seconds of all calls, each in the better of its layouts."""
        best = ctx.findings.contiguous_plans | plans
        return sum(
            min(_seconds(plan), _seconds(best[call]))
            for call, plan in ctx.findings.contiguous_plans.items()
        )

    return min(plans_by_layout, key=total)


def _in_layout(
    ctx: Context,
    layout: Layout,
    question: _Question,
    decide: Callable[[Workload, Layout], Plan],
) -> dict[AttentionCall, Plan]:
    """Plan the calls that can have a balanced layout."""
    plans: dict[AttentionCall, Plan] = {}
    if layout is Layout.CONTIGUOUS:
        return plans
    for call in ctx.findings.contiguous_plans:
        problem = _unsupported(call, ctx, layout)
        if problem is None:
            try:
                asked = question(call, layout)
                plan = decide(asked, layout)
                can_run = (c for c in plan.candidates if why_not_run(c, asked) is None)
                plans[call] = replace(plan, candidates=tuple(can_run))
            except RewriteError as error:
                problem = str(error)
        ordered = call.is_causal or call in ctx.findings.masks or call.score_mod
        if problem is not None and ctx.layout is not None and ordered:
            at = f"attention at {call.path}"
            warn_unmet(at, f"layout {layout.value!r}", problem)
    return plans


def _unsupported(call: AttentionCall, ctx: Context, layout: Layout) -> str | None:
    if ctx.length is not None and layout is not Layout.ZIGZAG:
        return _SYMBOLIC
    mask = ctx.findings.masks.get(call)
    if mask is not None and call.q_shape[-2] != call.k_shape[-2]:
        return f"{mask.text} over other keys than queries is computed in order"
    if leaves_ranks_empty(call.q_shape[-2], ctx.ranks):
        return f"{call.q_shape[-2]} tokens leave a rank without any"
    return None


def _seconds(plan: Plan) -> float:
    assert plan.chosen.seconds is not None, "what is chosen is possible"
    return plan.chosen.seconds


def _bias_bytes(call: AttentionCall, ctx: Context, work_left: MaskWork) -> int:
    """Return the bytes of a bias, in the dtype to which autocast brings the call."""
    mask = ctx.findings.masks.get(call)
    if mask is None or mask.bias is None:
        return work_left.bias_bytes
    if is_of_positions(fake_value(mask.bias)):
        return 0
    dtype = dtype_in_call(call, fake_value(mask.bias).dtype)
    return int(fake_value(mask.bias).numel()) * dtype.itemsize


def _whole_mask_bytes(call: AttentionCall, ctx: Context) -> int:
    """Return the bytes of a mask that could not be read; 0 if ranks have rows of it."""
    mask = ctx.findings.masks.get(call)
    unread = None if mask is None else mask.unread
    return unread.bytes if unread is not None and unread.is_whole else 0


def workload(
    call: AttentionCall, ctx: Context, work_left: MaskWork = NO_MASK
) -> Workload:
    """Return the sizes of a call for the cost model, and the work its mask leaves."""
    q, k, v = (fake_value(x) for x in (call.q, call.k, call.v))
    trained = ctx.backward and any(x.requires_grad for x in (q, k, v))
    q_shape, k_shape = call.q_shape, call.k_shape
    sources = ctx.findings.key_sources.get(call)
    return Workload(
        batch=q_shape[0],
        heads=q_shape[1] if q.ndim == 4 else 1,
        kv_heads=k_shape[1] if k.ndim == 4 else 1,
        q_len=q_shape[-2],
        kv_len=k_shape[-2],
        head_dim=q_shape[-1],
        value_dim=int(v.shape[-1]),
        bytes_per_element=call.dtype.itemsize,
        causal=call.is_causal,
        direction=Direction.BOTH if trained else Direction.FORWARD,
        ranks=ctx.ranks,
        live_fraction=work_left.live_fraction,
        masked=call in ctx.findings.masks or bool(call.score_mod),
        mean_live_fraction=work_left.mean_live_fraction,
        ring_steps=work_left.ring_steps,
        hybrid_rings=work_left.hybrid_rings,
        bias_bytes=_bias_bytes(call, ctx, work_left),
        whole_mask_bytes=_whole_mask_bytes(call, ctx),
        latents=None if sources is None else sources.sizes,
    )


Decide = Callable[[Workload], Plan]

# Lengths above are not looked at: a region that reaches so far has no end.
LONGEST_TOKENS = 2**30


def guard_plan(call: AttentionCall, plan: Plan, ctx: Context, decide: Decide) -> None:
    """Guard the lengths for which `decide` gives `plan` to `call`.

    Raises: LengthNotSymbolic if the call attends to another symbolic length.
    """
    if ctx.length is None:
        return
    sizes = [fake_value(x).shape[-2] for x in (call.q, call.k)]
    if not any(map(is_symbol, sizes)):
        return
    if any(is_symbol(n) and not is_same(n, ctx.length) for n in sizes):
        raise LengthNotSymbolic(
            f"attention at {call.path} is over {' and '.join(map(str, sizes))} tokens, "
            f"and the sequence has {ctx.length}"
        )
    low, high = region(plan, decide, *map(is_symbol, sizes))
    guard_region(ctx.length, low, high)


def region(
    plan: Plan, decide: Decide, vary_q: bool, vary_kv: bool
) -> tuple[int, int | None]:
    """Return the lengths [low, high) around the one of `plan` for which it is chosen.

    They go in steps of the number of ranks; `vary_q` and `vary_kv` say which lengths of
    the workload are the symbol. None is no limit.
    """
    workload = plan.workload
    ranks, length = workload.ranks, workload.q_len if vary_q else workload.kv_len

    def at(per_rank: int) -> Plan:
        tokens = per_rank * ranks
        return decide(
            dataclasses.replace(
                workload,
                q_len=tokens if vary_q else workload.q_len,
                kv_len=tokens if vary_kv else workload.kv_len,
            )
        )

    end = LONGEST_TOKENS // ranks + 1
    interval = crossover.region(at, length // ranks, 1, end)
    return interval.low * ranks, None if interval.high == end else interval.high * ranks
