"""cp::ring_attention: keys and values travel around the ring, queries stay.

Local view: each rank holds the chunk of the sequence that the contiguous layout gives
it. Method: Liu, Zaharia and Abbeel, Ring Attention (arXiv 2310.01889).

`ring_forward` and `ring_backward` are the ring: the operators run them at once, and the
pass expand_ring traces them into a graph. They are made of cp::ring_shift,
cp::attention_step and cp::ring_wait, in the order that hides the messages, and have the
same calls on every rank: the rank enters as integers only.

Note [dK and dV travel with their chunk]
In the backward, chunk s visits the ranks s, s + 1, ..., s + N - 1, and the gradient of
the chunk visits the same ranks one hop behind the computation: a rank adds its share
and passes the sum on in the *same* direction. After N hops the last one brings the
complete gradient home. (Going the other way mixes gradients of different chunks.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cpcompile.kernels.choice import StepKernel, step_kernel
from cpcompile.layout import Chunks
from cpcompile.ops.attention_step import attention_step
from cpcompile.ops.attention_step_backward import (
    attention_step_backward,
    attention_step_dkdv,
    attention_step_dq,
)
from cpcompile.ops.block_attention import row_dots
from cpcompile.ops.communication import call_site, group_by_name
from cpcompile.ops.contract import (
    check_operands,
    fake_backward,
    fake_forward,
    register_autograd,
)
from cpcompile.ops.ring_exchange import NOTHING_TO_HIDE_IT, ring_shift
from cpcompile.visibility import Visible, visible_chunk

_wait = torch.ops.cp.ring_wait.default


@dataclass(frozen=True)
class _Ring:
    """One rank's view of the ring."""

    queries: Chunks
    keys: Chunks
    is_causal: bool
    group: str
    rank: int
    direction: str

    @classmethod
    def of(cls, q_len: int, kv_len: int, causal: bool, group: str, what: str) -> _Ring:
        pg = group_by_name(group)
        chunks = Chunks(q_len, pg.size()), Chunks(kv_len, pg.size())
        return cls(*chunks, bool(causal), group, pg.rank(), what)

    @property
    def steps(self) -> int:
        return self.keys.ranks

    @property
    def place(self) -> str:
        """Names the operator and the rank, for messages."""
        what = f"the {self.direction} of cp::ring_attention"
        return f"{what} on rank {self.rank} of {self.steps} in group {self.group!r}"

    def visible(self, step: int) -> Visible:
        """What this rank's queries see of the chunk that is here in `step`."""
        source = (self.rank - step) % self.steps
        return visible_chunk(
            self.queries.start(self.rank),
            self.queries.count(self.rank),
            self.keys.start(source),
            self.keys.count(source),
            self.keys.size,
            self.is_causal,
        )

    def where(self, step: int, what: str, hidden: bool = True) -> str:
        """Names a message that is sent in `step`; see NOTHING_TO_HIDE_IT."""
        text = f"{what} of the {self.direction} of ring attention, step {step}"
        return text if hidden else text + NOTHING_TO_HIDE_IT

    def own_chunk(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """This rank's keys and values as they travel: contiguous, of the full size."""
        if self.keys.length % self.steps:
            missing = self.keys.size - k.shape[2]
            k, v = (F.pad(x, (0, 0, 0, missing)) for x in (k, v))
        return [k.contiguous(), v.contiguous()]


def ring_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_len: int,
    kv_len: int,
    is_causal: bool,
    scale: float,
    group: str,
) -> tuple[Tensor, Tensor]:
    """The steps of cp::ring_attention, whose arguments and results these are."""
    ring = _Ring.of(q_len, kv_len, is_causal, group, "forward")
    kernel = step_kernel(q.device.type, q.dtype, q.shape[-1], v.shape[-1]).value
    chunk = ring.own_chunk(k, v)
    state: tuple[Tensor | None, Tensor | None] = (None, None)
    for step in range(ring.steps):
        last, visible = step + 1 == ring.steps, ring.visible(step)
        where = ring.where(step, "keys and values", hidden=not visible.is_empty)
        arriving = [] if last else ring_shift(chunk, group, where)
        state = attention_step(
            *(q, *chunk, *state, None, None, *visible.to_lists()),
            *(scale, last, kernel, arriving[0] if arriving else None),
        )
        chunk = [_wait(x, state[0], where) for x in arriving]
    out, lse = state
    assert out is not None and lse is not None
    return out, lse


def ring_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_len: int,
    kv_len: int,
    is_causal: bool,
    scale: float,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The steps of cp::ring_attention_backward.

    See Note [Two forms of the backward] and Note [dK and dV travel with their chunk].
    """
    ring = _Ring.of(q_len, kv_len, is_causal, group, "backward")
    kernel = step_kernel(q.device.type, q.dtype, q.shape[-1], v.shape[-1])
    chunk = ring.own_chunk(k, v)
    split = kernel is StepKernel.TEMPLATE
    delta = row_dots(grad, out) if split else None
    dq: Tensor | None = None
    travelling: list[Tensor] = []  # dk and dv, on their way from the previous rank
    sent = ""
    for step in range(ring.steps):
        last, visible = step + 1 == ring.steps, ring.visible(step)
        hidden = not visible.is_empty
        where = ring.where(step, "keys and values", hidden)
        # Every message comes after the one before, and what hides one after the last.
        earlier = travelling[0] if travelling else None
        arriving = [] if last else ring_shift(chunk, group, where, earlier)
        after = arriving[0] if arriving else earlier
        limits = (*visible.to_lists(), scale)
        if split:
            totals = [_wait(x, dq, sent) for x in travelling] or [None, None]
            totals = attention_step_dkdv(
                *(grad, q, *chunk, lse, delta, *totals, None, None),
                *(*limits, False, kernel.value, after),
            )
        else:
            dq, *parts = attention_step_backward(
                *(grad, q, *chunk, out, lse, dq, *limits, last, kernel.value, after)
            )
            waited = [_wait(x, dq, sent) for x in travelling]
            totals = list(map(torch.add, waited, parts)) if waited else parts
        if ring.steps > 1:
            # Its own step hides it if dQ is still to come, else the next one.
            behind = (
                hidden if split else not last and not ring.visible(step + 1).is_empty
            )
            sent = ring.where(step, "dk and dv", behind)
            travelling = ring_shift(list(totals), group, sent)
        if split:
            dq = attention_step_dq(
                *(grad, q, *chunk, lse, delta, dq, None, None, *limits, last),
                *(kernel.value, travelling[0] if travelling else None),
            )
        chunk = [_wait(x, dq, where) for x in arriving]
    totals = [_wait(x, dq, sent) for x in travelling] or totals
    assert dq is not None
    count = k.shape[2]
    dk, dv = (
        total.narrow(2, 0, count).to(x.dtype, copy=True).contiguous()
        for total, x in zip(totals, (k, v), strict=True)
    )
    return dq, dk, dv


@torch.library.custom_op("cp::ring_attention", mutates_args=())
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_len: int,
    kv_len: int,
    is_causal: bool,
    scale: float,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Attention over a sequence sharded on `group`, by ring exchange.

    Args:
        q: [B, H, local queries, D], contiguous chunk of a sequence of `q_len` tokens.
        k: [B, G, local keys, D], H a multiple of G; chunk of `kv_len` tokens.
        v: [B, G, local keys, E].
        q_len, kv_len: lengths of the whole sequences, equal on every rank.
        is_causal: the query at global position p sees the keys at positions <= p.
        scale: factor of the scores.
        group: name of the process group.

    Returns: out [B, H, local queries, E] in q's dtype and the log-sum-exp of the scaled
    scores [B, H, local queries] in float32 (float64 for float64); rows without any key
    give 0 and -inf.

    Raises: ValueError if the local shapes are not those of the contiguous layout.
    """
    ring = _Ring.of(q_len, kv_len, is_causal, group, "forward")
    operands = (q, k, v, ring.queries, ring.keys, ring.rank)
    check_operands("cp::ring_attention", *operands)
    with call_site(ring.place):
        return ring_forward(q, k, v, q_len, kv_len, is_causal, scale, group)


@torch.library.custom_op("cp::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_len: int,
    kv_len: int,
    is_causal: bool,
    scale: float,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of cp::ring_attention, local and in the inputs' dtypes.

    Saved by the forward: q, k, v, out and lse, nothing per step; sums over steps are
    kept in the accumulation dtype.
    """
    ring = _Ring.of(q_len, kv_len, is_causal, group, "backward")
    operands = (q, k, v, ring.queries, ring.keys, ring.rank)
    check_operands("cp::ring_attention_backward", *operands)
    rest = (q_len, kv_len, is_causal, scale, group)
    with call_site(ring.place):
        return ring_backward(grad, q, k, v, out, lse, *rest)


ring_attention.register_fake(fake_forward)
ring_attention_backward.register_fake(fake_backward)
register_autograd(ring_attention, ring_attention_backward)
