"""cp::masked_ring_attention: the ring under a mask of positions, ids or values.

The steps are in masked_ring_steps.py, what a step computes in masked_steps.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpcompile.geometry.layout import Chunks
from cpcompile.geometry.mask_blocks import spans
from cpcompile.ops.attention.contract import check_operands
from cpcompile.ops.attention.masked_contract import (
    check_masks,
    fake_masked_backward,
    fake_masked_forward,
    mask_layout,
    register_masked_autograd,
)
from cpcompile.ops.attention.masked_ring_steps import (
    MaskedRing,
    Trips,
    masked_ring_backward,
    masked_ring_forward,
)
from cpcompile.ops.comm.communication import group_by_name
from cpcompile.ops.steps.masked_steps import MaskedGradients, MaskedRows, MaskOperands


@torch.library.custom_op("cp::masked_ring_attention", mutates_args=())
def masked_ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    limits: Tensor | None,
    q_ids: Tensor | None,
    k_ids: Tensor | None,
    q_len: int,
    kv_len: int,
    scale: float,
    group: str,
    layout: str = "contiguous",
    known: str = "",
) -> tuple[Tensor, Tensor]:
    """Attention under a mask over a sequence sharded on `group`, by ring exchange.

    A query sees a key if limits, ids and a bool bias all say so. Chunks of keys visit
    only the ranks that see any of their keys.

    Args:
        q, k, v, q_len, kv_len, scale, group: as for cp::ring_attention.
        bias: [B or 1, H or 1, local queries, kv_len], bool (True is visible) or added
            to the scaled scores; -inf and the lowest finite number hide a key.
        limits: [B or 1, q_len, 2], integers: query i sees the keys at positions
            limits[b, i, 0] <= j < limits[b, i, 1].
        q_ids, k_ids: [B or 1, q_len] and [B or 1, kv_len], integers: a query sees the
            keys with its own id.
        layout: "contiguous", or "zigzag" without a bias. limits and ids are in the
            order of the sequence, whole and the same on every rank, in any layout.
        known: the name of these limits and ids in known_masks.py, if they are kept.

    Returns: out [B, H, local queries, E] in q's dtype and the log-sum-exp of the scaled
    scores [B, H, local queries] in float32 (float64 for float64); rows that see no key
    give 0 and -inf.

    Raises: ValueError for shapes and dtypes that are not these, and for a zigzag
    layout with a bias or with other numbers of keys than of queries.
    """
    masks = MaskOperands(bias, limits, q_ids, k_ids, known)
    name, lengths = "cp::masked_ring_attention", (q_len, kv_len)
    ring = _ring(name, (q, k, v), masks, lengths, scale, group, layout)
    return masked_ring_forward(q, ring)


@torch.library.custom_op("cp::masked_ring_attention_backward", mutates_args=())
def masked_ring_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    limits: Tensor | None,
    q_ids: Tensor | None,
    k_ids: Tensor | None,
    q_len: int,
    kv_len: int,
    scale: float,
    group: str,
    layout: str = "contiguous",
    known: str = "",
    bias_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv, dbias) of cp::masked_ring_attention, local.

    dbias has the shape of the bias, and no elements unless `bias_grad`. Sums over steps
    are in the accumulation dtype.
    """
    masks = MaskOperands(bias, limits, q_ids, k_ids, known)
    name, lengths = "cp::masked_ring_attention_backward", (q_len, kv_len)
    ring = _ring(name, (q, k, v), masks, lengths, scale, group, layout, bias_grad)
    found = MaskedGradients(ring.rows, grad, q, out, lse, bias_grad)
    dk, dv = masked_ring_backward(found, ring)
    return found.result(dk, dv)


def _ring(
    name: str,
    operands: tuple[Tensor, Tensor, Tensor],
    masks: MaskOperands,
    lengths: tuple[int, int],
    scale: float,
    group: str,
    layout: str,
    bias_grad: bool = False,
) -> MaskedRing:
    """Raises ValueError for operands that are not this rank's."""
    q, k, v = operands
    pg = group_by_name(group)
    ranks, rank = pg.size(), pg.rank()
    queries, keys = (Chunks(length, ranks) for length in lengths)
    order = mask_layout(name, layout, lengths, masks.bias)
    check_operands(name, q, k, v, queries, keys, rank)
    check_masks(name, q, masks, lengths)
    local, held = (
        [spans(order, chunks, each) for each in range(ranks)]
        for chunks in (queries, keys)
    )
    rows = MaskedRows.of(q, v, masks, lengths, local, held, rank, scale, bias_grad)
    trips = Trips(rows.blocks.needed, everywhere=q.device.type != "cpu")
    place = f"{name} on rank {rank} of {ranks} in group {group!r}"
    return MaskedRing(rows, (k, v), keys, group, rank, trips, place)


masked_ring_attention.register_fake(fake_masked_forward)
masked_ring_attention_backward.register_fake(fake_masked_backward)
register_masked_autograd(masked_ring_attention, masked_ring_attention_backward)
