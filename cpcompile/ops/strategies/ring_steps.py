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

from cpcompile.kernels.choice import StepKernel, step_kernel
from cpcompile.ops.comm.ring_exchange import ring_shift
from cpcompile.ops.step.attention_step import attention_step
from cpcompile.ops.step.attention_step_backward import (
    attention_step_backward,
    attention_step_dkdv,
    attention_step_dq,
)
from cpcompile.ops.step.block_attention import (
    backward_kernel,
    row_dots,
    with_column,
)
from cpcompile.ops.step.masked_ring_step import (
    attention_step_masked,
    attention_step_masked_backward,
)
from cpcompile.ops.step.position_bias import new_bias_gradient
from cpcompile.ops.strategies.ring_masks import gradient_of_bias, under_mask
from cpcompile.ops.strategies.ring_schedule import Ring
from cpcompile.ops.strategies.sinks import with_sinks

_wait = torch.ops.cp.ring_wait.default


def ring_forward(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """Run the steps of cp::ring_attention, whose operands and results these are."""
    kernel = step_kernel(q.device.type, q.dtype, q.shape[-1], v.shape[-1])
    ring, mask = under_mask(ring, q, v)
    scale = ring.inputs.spec.scale
    chunk = ring.own_chunk(k, v)
    queries = ring.split(q)
    states: list[tuple[Tensor | None, Tensor | None]] = [(None, None) for _ in queries]
    for step in range(ring.steps):
        last = step + 1 == ring.steps
        where = ring.where(step, "keys and values", hidden=ring.computes(step))
        arriving = [] if last else _shift(ring, chunk, step, where)
        after = arriving[0] if arriving else None
        for call in ring.calls(step):
            operands = (queries[call.part], *chunk, *states[call.part])
            if mask is not None:
                arguments = mask.of_source(ring.source(step))
                states[call.part] = attention_step_masked(
                    *operands, *arguments, last, after
                )
            else:
                final = last and call.is_last
                rows = queries[call.part]
                limits = call.vectors_and_limits(rows, chunk[0], kernel)
                states[call.part] = attention_step(
                    *operands, *limits, scale, final, kernel.value, after
                )
            after = states[call.part][0]  # one after the other: the wait is after all
        chunk = [_wait(x, after, where) for x in arriving]
    outs, lses = zip(*states, strict=True)
    raised = None if mask is None else mask.summary.raised
    return with_sinks(_joined(outs), _joined(lses), ring.inputs.sinks, raised)


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
    """Run the steps of cp::ring_attention_backward, whose results these are.

    See Note [Two forms of the backward], Note [dK and dV travel with their chunk] and
    Note [Several runs of tokens].
    """
    kernel = backward_kernel(q, v, grad_lse)
    ring, mask = under_mask(ring, q, v, bias_grad)
    scale = ring.inputs.spec.scale
    chunk = ring.own_chunk(k, v)
    split = kernel is StepKernel.TEMPLATE and mask is None
    dbias: dict[int, Tensor] = {}  # by source, for its keys
    if split:
        out = row_dots(grad, out, grad_lse)  # the dots are all we need
    else:
        grad, out = with_column(grad, out, grad_lse)
    grads, queries, lses, outs = map(ring.split, (grad, q, lse, out))
    dqs: list[Tensor | None] = [None for _ in queries]
    done: Tensor | None = None  # what was computed last
    travelling: list[Tensor] = []  # dk and dv, on their way from the previous rank
    sent = ""
    for step in range(ring.steps):
        last, calls = step + 1 == ring.steps, ring.calls(step)
        hidden = ring.computes(step)
        where = ring.where(step, "keys and values", hidden)
        # Every message comes after the one before, and what hides one after the last.
        earlier = travelling[0] if travelling else None
        arriving = [] if last else _shift(ring, chunk, step, where, earlier)
        after = arriving[0] if arriving else earlier
        totals: list[Tensor]
        if split:
            waited = [_wait(x, done, sent) for x in travelling]
            sums: tuple[Tensor | None, ...] = (*waited,) or (None, None)
            for call in calls:
                part = call.part
                sums = attention_step_dkdv(
                    *(grads[part], queries[part], *chunk, lses[part], outs[part]),
                    *(*sums, *call.vectors_and_limits(queries[part], chunk[0], kernel)),
                    *(scale, False, kernel.value, after),
                )
            totals = [x for x in sums if x is not None]
        else:
            totals = []
            for call in calls:
                part = call.part
                operands = (grads[part], queries[part], *chunk, outs[part], lses[part])
                if mask is not None:
                    at = ring.source(step)
                    dqs[part], *new, dbias[at] = attention_step_masked_backward(
                        *operands, dqs[part], *mask.of_source(at), bias_grad, after
                    )
                else:
                    final, which = last and call.is_last, kernel.value
                    dqs[part], *new = attention_step_backward(
                        *operands, dqs[part], *call.limits, scale, final, which, after
                    )
                done = after = dqs[part]
                totals = list(map(torch.add, totals, new)) if totals else new
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
                part = call.part
                dqs[part] = attention_step_dq(
                    *(grads[part], queries[part], *chunk, lses[part], outs[part]),
                    dqs[part],
                    *call.vectors_and_limits(queries[part], chunk[0], kernel),
                    *(scale, last and call.is_last, kernel.value, after),
                )
                done = after = dqs[part]
        chunk = [_wait(x, done, where) for x in arriving]
    totals = [_wait(x, done, sent) for x in travelling] or totals
    count = k.shape[2]
    dk, dv = (
        total.narrow(2, 0, count).to(x.dtype, copy=True).contiguous()
        for total, x in zip(totals, (k, v), strict=True)
    )
    dq = _joined(dqs)
    if mask is not None:
        dq = dq.to(q.dtype)
    if ring.inputs.bias is None or not bias_grad:
        return dq, dk, dv, new_bias_gradient(q, None, False)
    return dq, dk, dv, gradient_of_bias(ring, dbias)


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
    found = [x for x in parts if x is not None]
    assert len(found) == len(parts), "every part of the queries has a step"
    return found[0] if len(found) == 1 else torch.cat(found, 2)
