"""Chooses a strategy for every attention call that can be rewritten.

AttentionCall  ->  Plan(chosen=ring, candidates=[ring 1.2 ms, all_gather 1.4 ms, ...])
"""

from __future__ import annotations

import functools
import logging

import torch.fx as fx

from cpcompile.cost.choose import choose
from cpcompile.errors import CannotRewrite
from cpcompile.passes.context import AttentionCall, Context
from cpcompile.passes.graph import fake_value
from cpcompile.passes.strategy_guard import guard_plan
from cpcompile.plans import Direction, Plan, Workload

log = logging.getLogger(__name__)


def choose_strategy(graph: fx.Graph, ctx: Context) -> int:
    """Fill `ctx.plans`; returns the number of calls that got a plan.

    Raises: CannotRewrite if no strategy is possible, or not the one that is forced.
    """

    @functools.cache  # layers repeat
    def decide(question: Workload) -> Plan:
        return choose(
            question,
            ctx.profile,
            strategy=ctx.strategy,
            degrees=ctx.degrees,
            memory_budget=ctx.memory_budget,
            tie_fraction=ctx.tie_fraction,
        )

    for call in ctx.calls:
        if call.obstacle is None and call.left_alone is None:
            try:
                plan = decide(workload(call, ctx))
            except CannotRewrite as error:
                raise CannotRewrite(f"attention at {call.path}: {error}") from error
            guard_plan(call, plan, ctx, decide)
            ctx.plans[call] = plan
            log.debug("attention at %s: %s", call.path, plan)
    return len(ctx.plans)


def workload(call: AttentionCall, ctx: Context) -> Workload:
    """The sizes of a call, as the cost model wants them."""
    q, k, v = (fake_value(x) for x in (call.q, call.k, call.v))
    trained = ctx.backward and any(x.requires_grad for x in (q, k, v))
    q_shape, k_shape = call.q_shape, call.k_shape
    return Workload(
        batch=q_shape[0],
        heads=q_shape[1] if q.ndim == 4 else 1,
        kv_heads=k_shape[1] if k.ndim == 4 else 1,
        q_len=q_shape[-2],
        kv_len=k_shape[-2],
        head_dim=q_shape[-1],
        value_dim=int(v.shape[-1]),
        bytes_per_element=q.element_size(),
        causal=call.is_causal,
        direction=Direction.BOTH if trained else Direction.FORWARD,
        ranks=ctx.ranks,
    )
