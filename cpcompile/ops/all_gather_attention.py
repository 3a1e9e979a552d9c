"""cp::all_gather_attention: keys and values are gathered once, queries stay.

One collective instead of N - 1 hops and one or two kernel calls instead of N, for the
memory of the whole keys and values. Method: the context parallelism of Llama 3 (arXiv
2407.21783, section 3.3.2). The backward gathers again and reduce-scatters dK and dV.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpcompile.layout import Chunks, visible_blocks
from cpcompile.ops.block_attention import accumulation_dtype, take_keys
from cpcompile.ops.communication import (
    Packing,
    all_gather_chunks,
    group_by_name,
    reduce_scatter_chunks,
)
from cpcompile.ops.contract import (
    check_operands,
    fake_backward,
    fake_forward,
    register_autograd,
)
from cpcompile.ops.online_softmax import RunningAttention, RunningGradients


@torch.library.custom_op("cp::all_gather_attention", mutates_args=())
def all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_len: int,
    kv_len: int,
    is_causal: bool,
    scale: float,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Attention over a sequence sharded on `group`, on gathered keys and values.

    Arguments, results and errors are those of cp::ring_attention.
    """
    pg = group_by_name(group)
    ranks, rank = pg.size(), pg.rank()
    queries, keys = Chunks(q_len, ranks), Chunks(kv_len, ranks)
    check_operands("cp::all_gather_attention", q, k, v, queries, keys, rank)
    k_full, v_full = _gather(k, v, keys, group, "forward")
    running = RunningAttention(q, v.shape[-1], scale)
    running.add(
        k_full,
        v_full,
        visible_blocks(
            queries.start(rank), queries.count(rank), 0, kv_len, bool(is_causal)
        ),
    )
    return running.result()


@torch.library.custom_op("cp::all_gather_attention_backward", mutates_args=())
def all_gather_attention_backward(
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
    """Gradients (dq, dk, dv) of cp::all_gather_attention, local.

    Sums over blocks and over ranks are in the accumulation dtype.
    """
    pg = group_by_name(group)
    ranks, rank = pg.size(), pg.rank()
    queries, keys = Chunks(q_len, ranks), Chunks(kv_len, ranks)
    check_operands("cp::all_gather_attention_backward", q, k, v, queries, keys, rank)
    k_full, v_full = _gather(k, v, keys, group, "backward")
    running = RunningGradients(grad.contiguous(), q, out, lse, scale)
    parts = running.add(
        k_full,
        v_full,
        visible_blocks(
            queries.start(rank), queries.count(rank), 0, kv_len, bool(is_causal)
        ),
    )
    dtype = accumulation_dtype(k.dtype)
    padded = keys.size * ranks
    dk_full = k.new_zeros((*k.shape[:2], padded, k.shape[-1]), dtype=dtype)
    dv_full = v.new_zeros((*v.shape[:2], padded, v.shape[-1]), dtype=dtype)
    for block, dk, dv in parts:
        take_keys(dk_full, block).add_(dk)
        take_keys(dv_full, block).add_(dv)
    packing = Packing.of(k, v, keys.size)
    chunks = zip(
        dk_full.unflatten(2, (ranks, keys.size)).unbind(2),
        dv_full.unflatten(2, (ranks, keys.size)).unbind(2),
        strict=True,
    )
    buffers = torch.stack([packing.pack(*chunk) for chunk in chunks])
    where = f"the backward of cp::all_gather_attention on rank {rank} of {ranks}"
    reduced = reduce_scatter_chunks(buffers, pg, where) if ranks > 1 else buffers[0]
    dk, dv = (x.narrow(2, 0, k.shape[2]) for x in packing.views(reduced))
    return (
        running.dq.to(q.dtype),
        dk.to(k.dtype, copy=True).contiguous(),
        dv.to(v.dtype, copy=True).contiguous(),
    )


def _gather(
    k: Tensor, v: Tensor, keys: Chunks, group: str, direction: str
) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole sequence, [B, G, kv_len, dim]."""
    pg = group_by_name(group)
    if pg.size() == 1:
        return k, v
    packing = Packing.of(k, v, keys.size)
    where = f"the {direction} of cp::all_gather_attention on rank {pg.rank()}"
    gathered = all_gather_chunks(packing.pack(k, v), pg, where)
    parts = [packing.views(row) for row in gathered.unbind(0)]
    k_full, v_full = (torch.cat(list(x), 2) for x in zip(*parts, strict=True))
    return k_full.narrow(2, 0, keys.length), v_full.narrow(2, 0, keys.length)


all_gather_attention.register_fake(fake_forward)
all_gather_attention_backward.register_fake(fake_backward)
register_autograd(all_gather_attention, all_gather_attention_backward)
