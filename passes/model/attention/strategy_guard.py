"""Guard a decision: a strategy that was chosen for one length serves those like it.

With a symbolic sequence length, a plan is right in the region of lengths around the one
that is compiled in which the same form is chosen. The region becomes a guard, so that
Dynamo compiles once more where it ends, and never inside of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from cpcompile.cost import crossover
from cpcompile.cost.plans import Plan, Workload
from cpcompile.geometry.lengths import (
    LengthNotSymbolic,
    guard_region,
    is_same,
    is_symbol,
)

from ...graph.context import AttentionCall, Context
from ...graph.nodes import fake_value

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
