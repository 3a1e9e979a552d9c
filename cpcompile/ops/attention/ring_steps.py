"""The ring: shifts, steps and waits in the order that hides the messages.

`ring_forward` and `ring_backward` are run at once by the operators in ring_attention.py
and traced into a graph by the pass expand_ring. They are made of cp::ring_shift,
cp::attention_step and cp::ring_wait and have the same calls on every rank: the rank
enters as integers only.

Note [dK and dV travel with their chunk]
In the backward, chunk s visits the ranks s, s + 1, ..., s + N - 1, and the gradient of
the chunk visits the same ranks one hop behind the computation: a rank adds its share
and passes the sum on in the *same* direction. After N hops the last one brings the
complete gradient home. (Going the other way mixes gradients of different chunks.)

Note [Several runs of tokens]
A rank whose tokens are several runs of the sequence computes causal attention run by
run: each run of queries has a chain of steps of its own. What travels are all keys of a
rank together, so messages are those of the plain ring, and hidden by more steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cpcompile.geometry.layout import Runs, TokenLayout
from cpcompile.geometry.visibility import (
    NOTHING,
    Visible,
    visible_chunk,
    visible_run,
    visible_tokens,
)
from cpcompile.kernels.choice import StepKernel, step_kernel
from cpcompile.ops.attention.contract import dealt_tokens
from cpcompile.ops.comm.communication import group_by_name
from cpcompile.ops.comm.ring_exchange import NOTHING_TO_HIDE_IT, ring_shift
from cpcompile.ops.steps.attention_step import attention_step
from cpcompile.ops.steps.attention_step_backward import (
    attention_step_backward,
    attention_step_dkdv,
    attention_step_dq,
)
from cpcompile.ops.steps.block_attention import row_dots
from cpcompile.plans import Layout

_wait = torch.ops.cp.ring_wait.default


def runs_of(length: int, ranks: int, size: int | None, pieces: int) -> Runs:
    """The tokens of the ranks; one chunk each if no size is given."""
    if size is None:
        return Runs.contiguous(length, ranks)
    return Runs(length, ranks, size, pieces)


def check_pieces(name: str, pieces: int, layout: str) -> None:
    """Raise ValueError for several runs of tokens in a layout that has none."""
    if pieces != 1 and layout != Layout.CONTIGUOUS.value:
        raise ValueError(
            f"{name}: got {pieces} runs of tokens in the {layout} layout; needed "
            "pieces=1, or layout='contiguous'"
        )


@dataclass(frozen=True)
class Step:
    """One call of a ring step: which part of the local queries, and what it sees."""

    part: int
    visible: Visible
    is_last: bool  # of this part, in the step

    @property
    def limits(self) -> tuple[list[int], ...]:
        """rows, keys, upper and lower, as the operators take them."""
        return self.visible.to_lists()


@dataclass(frozen=True)
class Ring:
    """One rank's view of the ring."""

    queries: Runs
    keys: Runs
    is_causal: bool
    group: str
    rank: int
    direction: str
    tokens: TokenLayout | None = None  # which are where; None: as queries and keys say

    @classmethod
    def of(
        cls,
        q_len: int,
        kv_len: int,
        is_causal: bool,
        group: str,
        direction: str,
        pieces: int = 1,
        q_size: int | None = None,
        kv_size: int | None = None,
        layout: str = Layout.CONTIGUOUS.value,
    ) -> Ring:
        """The ring of `group`; arguments and errors are those of cp::ring_attention."""
        pg = group_by_name(group)
        queries, keys = (
            runs_of(length, pg.size(), size, pieces)
            for length, size in ((q_len, q_size), (kv_len, kv_size))
        )
        name, causal = "cp::ring_attention", bool(is_causal)
        tokens = dealt_tokens(name, layout, tuple(Layout), queries, keys, causal)
        check_pieces(name, pieces, layout)
        return cls(queries, keys, causal, group, pg.rank(), direction, tokens)

    @property
    def steps(self) -> int:
        return self.keys.ranks

    @property
    def place(self) -> str:
        """Names the operator and the rank, for messages."""
        what = f"the {self.direction} of cp::ring_attention"
        return f"{what} on rank {self.rank} of {self.steps} in group {self.group!r}"

    def calls(self, step: int) -> tuple[Step, ...]:
        """What is computed in `step`, on the chunk that is here then."""
        source = (self.rank - step) % self.steps
        if not self.is_causal:
            visible = visible_chunk(
                *(0, self.queries.count(self.rank), 0, self.keys.count(source)),
                *(self.keys.padded, False),
            )
            return (Step(0, visible, True),)
        if self.tokens is not None:
            return (Step(0, self._dealt(self.tokens, source), True),)
        found = []
        for part in range(self.queries.pieces):
            seen = visible_run(self.queries, self.rank, part, self.keys, source)
            found += [Step(part, each, False) for each in seen[:-1]]
            found.append(Step(part, seen[-1], True))
        return tuple(found)

    def _dealt(self, tokens: TokenLayout, source: int) -> Visible:
        visible = visible_tokens(tokens, self.rank, source)
        # A rank's only query is in the first round, before the keys of later ranks.
        alone = visible.upper is not None and visible.upper[0] < 1
        return NOTHING if alone and tokens.count(self.rank) == 1 else visible

    def computes(self, step: int) -> bool:
        """Whether this rank has anything to compute in `step`."""
        return not all(call.visible.is_empty for call in self.calls(step))

    def split(self, x: Tensor) -> list[Tensor]:
        """The parts of the queries, [B, H, tokens, ...], that have their own steps."""
        if not self.is_causal or self.queries.pieces == 1:
            return [x]
        runs = range(self.queries.pieces)
        return list(x.split([self.queries.run(self.rank, each) for each in runs], 2))

    def where(self, step: int, what: str, hidden: bool = True) -> str:
        """Names a message that is sent in `step`; see NOTHING_TO_HIDE_IT."""
        text = f"{what} of the {self.direction} of ring attention, step {step}"
        return text if hidden else text + NOTHING_TO_HIDE_IT

    def own_chunk(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """This rank's keys and values as they travel: contiguous, of the full size."""
        if self.keys.length != self.keys.padded * self.steps:
            missing = self.keys.padded - k.shape[2]
            k, v = (F.pad(x, (0, 0, 0, missing)) for x in (k, v))
        return [k.contiguous(), v.contiguous()]


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, ring: Ring
) -> tuple[Tensor, Tensor]:
    """The steps of cp::ring_attention, whose operands and results these are."""
    kernel = step_kernel(q.device.type, q.dtype, q.shape[-1], v.shape[-1]).value
    chunk = ring.own_chunk(k, v)
    queries = ring.split(q)
    states: list[tuple[Tensor | None, Tensor | None]] = [(None, None) for _ in queries]
    for step in range(ring.steps):
        last = step + 1 == ring.steps
        where = ring.where(step, "keys and values", hidden=ring.computes(step))
        arriving = [] if last else ring_shift(chunk, ring.group, where)
        after = arriving[0] if arriving else None
        for call in ring.calls(step):
            states[call.part] = attention_step(
                *(queries[call.part], *chunk, *states[call.part], None, None),
                *(*call.limits, scale, last and call.is_last, kernel, after),
            )
            after = states[call.part][0]  # one after the other: the wait is after all
        chunk = [_wait(x, after, where) for x in arriving]
    return _joined([out for out, _ in states]), _joined([lse for _, lse in states])


def ring_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    ring: Ring,
) -> tuple[Tensor, Tensor, Tensor]:
    """The steps of cp::ring_attention_backward.

    See Note [Two forms of the backward], Note [dK and dV travel with their chunk] and
    Note [Several runs of tokens].
    """
    kernel = step_kernel(q.device.type, q.dtype, q.shape[-1], v.shape[-1])
    chunk = ring.own_chunk(k, v)
    split = kernel is StepKernel.TEMPLATE
    grads, queries, lses = ring.split(grad), ring.split(q), ring.split(lse)
    outs = ring.split(row_dots(grad, out) if split else out)  # the dots are all we need
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
        arriving = [] if last else ring_shift(chunk, ring.group, where, earlier)
        after = arriving[0] if arriving else earlier
        totals: list[Tensor]
        if split:
            waited = [_wait(x, done, sent) for x in travelling]
            sums: tuple[Tensor | None, ...] = (*waited,) or (None, None)
            for call in calls:
                part = call.part
                sums = attention_step_dkdv(
                    *(grads[part], queries[part], *chunk, lses[part], outs[part]),
                    *(*sums, None, None, *call.limits, scale),
                    *(False, kernel.value, after),
                )
            totals = [x for x in sums if x is not None]
        else:
            totals = []
            for call in calls:
                part = call.part
                dqs[part], *new = attention_step_backward(
                    *(grads[part], queries[part], *chunk, outs[part], lses[part]),
                    *(dqs[part], *call.limits, scale, last and call.is_last),
                    *(kernel.value, after),
                )
                done = after = dqs[part]
                totals = list(map(torch.add, totals, new)) if totals else new
            waited = [_wait(x, done, sent) for x in travelling]
            totals = list(map(torch.add, waited, totals)) if waited else totals
        if ring.steps > 1:
            # Its own step hides it if dQ is still to come, else the next one.
            behind = hidden if split else not last and ring.computes(step + 1)
            sent = ring.where(step, "dk and dv", behind)
            travelling = ring_shift(totals, ring.group, sent)
        if split:
            after = travelling[0] if travelling else None
            for call in calls:
                part = call.part
                dqs[part] = attention_step_dq(
                    *(grads[part], queries[part], *chunk, lses[part], outs[part]),
                    *(dqs[part], None, None, *call.limits, scale),
                    *(last and call.is_last, kernel.value, after),
                )
                done = after = dqs[part]
        chunk = [_wait(x, done, where) for x in arriving]
    totals = [_wait(x, done, sent) for x in travelling] or totals
    count = k.shape[2]
    dk, dv = (
        total.narrow(2, 0, count).to(x.dtype, copy=True).contiguous()
        for total, x in zip(totals, (k, v), strict=True)
    )
    return _joined(dqs), dk, dv


def _joined(parts: list[Tensor | None]) -> Tensor:
    """The inverse of Ring.split, when every part is computed."""
    found = [x for x in parts if x is not None]
    assert len(found) == len(parts), "every part of the queries has a step"
    return found[0] if len(found) == 1 else torch.cat(found, 2)
