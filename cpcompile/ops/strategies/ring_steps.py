"""The ring: shifts, steps and waits in the order that hides the messages.

`ring_forward` and `ring_backward` are run at once by the operators in ring_attention.py
and traced into a graph by the pass expand_ring. They are made of cp::ring_shift,
cp::attention_step and cp::ring_wait and have the same calls on every rank: the rank
enters as integers only.

Note [dK and dV travel with their chunk]
In the backward, chunk s visits the ranks s, s + 1, ..., s + N - 1, and the gradient of
the chunk visits the same ranks one hop after the computation: a rank adds its share
and passes the sum on in the *same* direction. After N hops the last one brings the
complete gradient home. (Going the other way mixes gradients of different chunks.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.comm.ring_exchange import ring_shift
from cpcompile.ops.step.attention_step import attention_step, plain_step
from cpcompile.ops.step.attention_step_backward import (
    Parts,
    attention_step_backward,
    step_backward,
)
from cpcompile.ops.step.block_attention import row_dots, with_column
from cpcompile.ops.step.kernel_choice import call_kernel
from cpcompile.ops.step.position_bias import new_bias_gradient
from cpcompile.ops.strategies.ring_masks import gradient_of_bias, under_mask
from cpcompile.ops.strategies.ring_schedule import Ring, RingStep
from cpcompile.ops.strategies.sinks import with_sinks

_wait = torch.ops.cp.ring_wait.default


def ring_forward(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """Run the steps of cp::ring_attention, whose operands and results these are."""
    kernel = call_kernel(q, v, ring.inputs)
    ring = under_mask(ring, q, kernel)
    chunk = ring.own_chunk(k, v)
    queries = ring.split(q)
    states: list[tuple[Tensor | None, Tensor | None]] = [(None, None) for _ in queries]
    for step in range(ring.steps):
        last = step + 1 == ring.steps
        where = ring.where(step, "keys and values", hidden=ring.computes(step))
        arriving = [] if last else _shift(ring, chunk, step, where)
        after = arriving[0] if arriving else None
        for call in ring.calls(step):
            rows = queries[call.part]
            seen = ring.seen(step, call, rows, chunk[0], kernel)
            operands = (rows, chunk[0], chunk[1], *states[call.part])
            final = last and call.is_last
            if ring.is_plain(q):
                states[call.part] = plain_step(*operands, seen, final, kernel)
            else:
                how = (*seen.arguments(), final, kernel.value, after)
                states[call.part] = attention_step(*operands, *how)
            after = states[call.part][0]  # one after the other: the wait is after all
        chunk = [_wait(x, after, where) for x in arriving]
    outs, lses = zip(*states, strict=True)
    row_shift = None if ring.summary is None else ring.summary.row_shift
    return with_sinks(_joined(outs), _joined(lses), ring.inputs.sinks, row_shift)


def ring_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ring: Ring,
    bias_grad: bool = False,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the steps of cp::ring_attention_backward, whose results these are."""
    saved = (grad, q, k, v, out, lse)
    dq, totals, dbias = step_gradients(*saved, ring, bias_grad, grad_lse)
    dk, dv = (
        total.narrow(2, 0, x.shape[2]).to(x.dtype, copy=True).contiguous()
        for total, x in zip(totals, (k, v), strict=True)
    )
    return dq, dk, dv, dbias


def step_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ring: Ring,
    bias_grad: bool = False,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return dq, dbias, and in the accumulation dtype dk and dv, which may be padded.

    See Note [Two forms of the backward], Note [dK and dV travel with their chunk] and
    Note [Several runs of tokens].
    """
    kernel = call_kernel(q, v, ring.inputs, bias_grad, grad_lse)
    split = kernel is StepKernel.TEMPLATE and not ring.inputs.has_modifiers
    ring = under_mask(ring, q, kernel, bias_grad)
    chunk = ring.own_chunk(k, v)
    dbias: dict[int, Tensor] = {}  # by source, for its keys
    if split:
        out = row_dots(grad, out, grad_lse)  # the dots are all we need
    else:
        grad, out = with_column(grad, out, grad_lse)
    saved = [*zip(*map(ring.split, (grad, q, lse, out)), strict=True)]
    dqs: list[list[Tensor]] = [[] for _ in saved]
    done: Tensor | None = None  # what was computed last
    travelling: list[Tensor] = []  # dk and dv, on their way from the previous rank
    sent = ""

    def computed(
        step: int, call: RingStep, parts: Parts, sums: list[Tensor], final: bool
    ) -> list[Tensor]:
        grad, q, lse, out = saved[call.part]
        seen = ring.seen(step, call, q, chunk[0], kernel)
        operands = (grad, q, chunk[0], chunk[1], lse, out, sums)
        if ring.is_plain(q):
            return step_backward(*operands, parts, seen, final, kernel)
        how = (*seen.arguments(), final, kernel.value, after)
        gradients: list[Tensor] = attention_step_backward(*operands, parts.value, *how)
        return gradients

    for step in range(ring.steps):
        last, calls = step + 1 == ring.steps, ring.calls(step)
        hidden = ring.computes(step)
        where = ring.where(step, "keys and values", hidden)
        # Every message comes after the one before, and what hides one after the last.
        earlier = travelling[0] if travelling else None
        arriving = [] if last else _shift(ring, chunk, step, where, earlier)
        after = arriving[0] if arriving else earlier
        totals: list[Tensor] = []
        if split:
            totals = [_wait(x, done, sent) for x in travelling]
            for call in calls:
                totals = computed(step, call, Parts.DKDV, totals, False)
        else:
            parts = Parts.ALL_AND_BIAS if bias_grad else Parts.ALL
            for call in calls:
                final = last and call.is_last
                dq, dk, dv, *rest = computed(step, call, parts, dqs[call.part], final)
                dqs[call.part], done, after = [dq], dq, dq
                totals = [*map(torch.add, totals, (dk, dv))] if totals else [dk, dv]
                if rest:
                    (dbias[ring.source(step)],) = rest
            waited = [_wait(x, done, sent) for x in travelling]
            totals = list(map(torch.add, waited, totals)) if waited else totals
        if ring.steps > 1:
            # Its own step hides it if dQ is still to come, else the next one.
            behind = hidden if split else not last and ring.computes(step + 1)
            sent = ring.where(step, "dk and dv", behind)
            travelling = _shift(ring, totals, step, sent)
        if split:
            after = travelling[0] if travelling else None
            for call in calls:
                sums, final = dqs[call.part], last and call.is_last
                dqs[call.part] = computed(step, call, Parts.DQ, sums, final)
                done = after = dqs[call.part][0]
        chunk = [_wait(x, done, where) for x in arriving]
    totals = [_wait(x, done, sent) for x in travelling] or totals
    dq = _joined([sum_ for sums in dqs for sum_ in sums])
    if ring.inputs.bias is None or not bias_grad:
        return dq, totals, new_bias_gradient(q, None, False)
    return dq, totals, gradient_of_bias(ring, dbias)


def _shift(
    ring: Ring,
    tensors: list[Tensor],
    step: int,
    where: str,
    after: Tensor | None = None,
) -> list[Tensor]:
    """Send to where tensors are needed in the next step; after the last one, home."""
    distance = ring.offset(step + 1) - ring.offset(step)
    far = () if distance == 1 else (distance,)
    arriving: list[Tensor] = ring_shift(tensors, ring.group, where, after, *far)
    return arriving


def _joined(parts: Sequence[Tensor | None]) -> Tensor:
    """Undo Ring.split, when every part is computed."""
    computed = [x for x in parts if x is not None]
    assert len(computed) == len(parts), "every part of the queries has a step"
    return computed[0] if len(computed) == 1 else torch.cat(computed, 2)
