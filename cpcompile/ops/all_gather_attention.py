"""cp::all_gather_attention: keys and values are gathered once, queries stay.

One collective instead of N - 1 hops and one or two kernel calls instead of N, for the
memory of the whole keys and values. Method: the context parallelism of Llama 3 (arXiv
2407.21783, section 3.3.2). The backward gathers again and reduce-scatters dK and dV.
"""

from __future__ import annotations

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
from cpcompile.visibility import Visible, visible_chunk


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
    visible = _visible(queries, keys, rank, is_causal)
    kernel = step_kernel(q.device.type, q.dtype, q.shape[-1], v.shape[-1])
    out, lse = attention_step(
        *(q, k_full, v_full, None, None, None, None, *visible.to_lists()),
        *(scale, True, kernel.value),
    )
    return out, lse


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
    limits = (*_visible(queries, keys, rank, is_causal).to_lists(), scale)
    kernel = step_kernel(q.device.type, q.dtype, q.shape[-1], v.shape[-1])
    if kernel is StepKernel.TEMPLATE:
        operands = (grad, q, k_full, v_full, lse, row_dots(grad, out))
        rest = (None, None, *limits)
        dk_full, dv_full = attention_step_dkdv(
            *(*operands, None, None, *rest, False, kernel.value)
        )
        dq = attention_step_dq(*operands, None, *rest, True, kernel.value)
    else:
        dq, dk_full, dv_full = attention_step_backward(
            *(grad, q, k_full, v_full, out, lse, None, *limits, True, kernel.value)
        )
    padding = (0, 0, 0, keys.size * ranks - kv_len)
    dk_full, dv_full = F.pad(dk_full, padding), F.pad(dv_full, padding)
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
        dq,
        dk.to(k.dtype, copy=True).contiguous(),
        dv.to(v.dtype, copy=True).contiguous(),
    )


def _visible(queries: Chunks, keys: Chunks, rank: int, causal: bool) -> Visible:
    """What the local queries see of all keys."""
    start, count = queries.start(rank), queries.count(rank)
    return visible_chunk(start, count, 0, keys.length, keys.length, bool(causal))


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
