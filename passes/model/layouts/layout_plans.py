"""What the layout of tokens makes of the plans of attention calls."""

from __future__ import annotations

import dataclasses

from cpcompile.cost.choose import predict, rank
from cpcompile.cost.plans import Plan
from cpcompile.torch_private.dynamo import counters

from ...graph.context import AttentionCall, Context

# Relayouts of a call that would be laid out by itself: of q, k, v and of its output.
_PER_CALL = 4


def note_relayouts(ctx: Context, left: int, calls: int) -> None:
    """Note how many relayouts the forward has; calls: in a balanced layout."""
    cancelled = _PER_CALL * calls - left
    ctx.findings.relayouts, ctx.findings.relayouts_cancelled = left, cancelled
    counters["cpcompile"]["relayouts_left"] += left
    counters["cpcompile"]["relayouts_cancelled"] += cancelled


def compared(ctx: Context, call: AttentionCall, laid_out: bool, relaid: bool) -> Plan:
    """Return the plan of a call, with the candidates of both layouts.

    relaid: whether relayouts of its operands or its output stay.
    """
    before, balanced = (
        ctx.findings.contiguous_plans[call],
        ctx.findings.balanced_plans[call],
    )
    free = list(balanced.candidates)
    form = dataclasses.replace(balanced.chosen, relayout=True)
    budget = float("inf")  # a relayout needs no more memory than the call
    paid = predict(form, balanced.workload, ctx.profile, budget)
    if laid_out:
        chosen = paid if relaid else balanced.chosen
        problem = "its relayouts stay in this graph" if relaid else None
    else:
        chosen, problem = before.chosen, "relayouts would cost more than it saves"
    if problem is not None:
        free = [dataclasses.replace(c, excluded=c.excluded or problem) for c in free]
    every = [*before.candidates, *free, paid]
    candidates = rank(every, ctx.tie_fraction, ctx.attention_bytes)
    return dataclasses.replace(before, chosen=chosen, candidates=candidates)
