"""cp::ring_attention: keys and values travel around the ring, queries stay.

Local view: each rank holds the chunk of the sequence that the contiguous layout gives
it. Method: Liu, Zaharia and Abbeel, Ring Attention (arXiv 2310.01889); the merge is in
Note [Merging two softmaxes].

Note [dK and dV travel with their chunk]
In the backward, chunk s visits the ranks s, s + 1, ..., s + N - 1, and the gradient of
the chunk visits the same ranks one hop behind the computation: a rank adds its share
and passes the sum on in the *same* direction. After N hops the last one brings the
complete gradient home. (Going the other way mixes gradients of different chunks.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpcompile.layout import Block, Chunks, visible_blocks
from cpcompile.ops.block_attention import accumulation_dtype, take_keys
from cpcompile.ops.communication import Packing, RingShift, group_by_name
from cpcompile.ops.contract import (
    check_operands,
    fake_backward,
    fake_forward,
    register_autograd,
)
from cpcompile.ops.online_softmax import RunningAttention, RunningGradients


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
    pg = group_by_name(group)
    ranks, rank = pg.size(), pg.rank()
    queries, keys = Chunks(q_len, ranks), Chunks(kv_len, ranks)
    check_operands("cp::ring_attention", q, k, v, queries, keys, rank)
    packing = Packing.of(k, v, keys.size)
    running = RunningAttention(q, v.shape[-1], scale)
    chunk = packing.pack(k, v) if ranks > 1 else None
    for step in range(ranks):
        source = (rank - step) % ranks
        shift = None
        if chunk is not None and step + 1 < ranks:
            where = f"the forward of cp::ring_attention, step {step} of {ranks}"
            shift = RingShift(chunk, pg, where)
        k_step, v_step = (k, v) if chunk is None else packing.views(chunk)
        running.add(
            k_step, v_step, _visible(queries, keys, rank, source, bool(is_causal))
        )
        if shift is not None:
            chunk = shift.wait()
    return running.result()


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

    See Note [dK and dV travel with their chunk]. Saved by the forward: q, k, v, out and
    lse, nothing per step; sums over steps are kept in the accumulation dtype.
    """
    pg = group_by_name(group)
    ranks, rank = pg.size(), pg.rank()
    queries, keys = Chunks(q_len, ranks), Chunks(kv_len, ranks)
    check_operands("cp::ring_attention_backward", q, k, v, queries, keys, rank)
    packing = Packing.of(k, v, keys.size)
    running = RunningGradients(grad.contiguous(), q, out, lse, scale)
    chunk = packing.pack(k, v)
    total = chunk.new_zeros(packing.numel, dtype=accumulation_dtype(k.dtype))
    total_shift: RingShift | None = None
    for step in range(ranks):
        source = (rank - step) % ranks
        where = f"the backward of cp::ring_attention, step {step} of {ranks}"
        shift = RingShift(chunk, pg, f"{where} (k, v)") if step + 1 < ranks else None
        parts = running.add(
            *packing.views(chunk),
            _visible(queries, keys, rank, source, bool(is_causal)),
        )
        if total_shift is not None:
            total = total_shift.wait()
        dk_total, dv_total = packing.views(total)
        for block, dk, dv in parts:
            take_keys(dk_total, block).add_(dk)
            take_keys(dv_total, block).add_(dv)
        if ranks > 1:
            total_shift = RingShift(total, pg, f"{where} (dk, dv)")
        if shift is not None:
            chunk = shift.wait()
    if total_shift is not None:
        total = total_shift.wait()
    dk_total, dv_total = packing.views(total)
    count = k.shape[2]
    return (
        running.dq.to(q.dtype),
        dk_total.narrow(2, 0, count).to(k.dtype, copy=True).contiguous(),
        dv_total.narrow(2, 0, count).to(v.dtype, copy=True).contiguous(),
    )


def _visible(
    queries: Chunks, keys: Chunks, rank: int, source: int, causal: bool
) -> tuple[Block, ...]:
    return visible_blocks(
        queries.start(rank),
        queries.count(rank),
        keys.start(source),
        keys.count(source),
        causal,
    )


ring_attention.register_fake(fake_forward)
ring_attention_backward.register_fake(fake_backward)
register_autograd(ring_attention, ring_attention_backward)
