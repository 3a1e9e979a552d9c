"""cp::masked_ulysses_attention: some heads over whole sequences under a mask.

    q, k, v, bias -> cp::ulysses_scatter -> cp::masked_attention -> cp::ulysses_gather

A composition, for autograd too, as cp::ulysses_attention is. limits and ids are whole
on every rank as it is. A bias with heads goes with them; one without, which all heads
read, goes to all ranks as a key head does that all query heads read, so that its
gradients are summed on the way back.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from cpcompile.geometry.layout import Chunks
from cpcompile.geometry.lengths import in_chunks
from cpcompile.ops.attention.contract import check_operands
from cpcompile.ops.attention.masked_attention import masked_attention
from cpcompile.ops.attention.masked_contract import check_masks
from cpcompile.ops.attention.masked_dtensor_rules import (
    gradient_placements,
    mask_placements,
)
from cpcompile.ops.comm.communication import group_by_name
from cpcompile.ops.comm.head_exchange import ulysses_scatter, with_exchanged_heads
from cpcompile.ops.dtensor.composite import define_composite
from cpcompile.ops.dtensor.dtensor_rules import alike, as_dtensors, axis_of_group
from cpcompile.ops.dtensor.local_part import contiguous_strides, local_part
from cpcompile.ops.steps.masked_steps import MaskOperands


def masked_ulysses_attention(
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
    known: str = "",
) -> Tensor:
    """Attention under a mask over a sequence sharded on `group`, by exchange of heads.

    Arguments and errors are those of cp::masked_ring_attention, for any number of
    heads; tensors may be DTensors, which are brought to the layout that is needed.

    Returns: out [B, H, local queries, E] in q's dtype; rows that see no key are 0.
    """
    masks = (bias, limits, q_ids, k_ids)
    if not any(isinstance(x, DTensor) for x in (q, k, v, *masks)):
        own = MaskOperands(*masks, known)
        return _local(q, k, v, own, (q_len, kv_len), scale, group)
    mesh = next(x for x in (q, k, v, *masks) if isinstance(x, DTensor)).device_mesh
    operands = as_dtensors((q, k, v), mesh)
    placements = alike(operands, axis_of_group(mesh, group))
    parts = (local_part(x.redistribute(placements=placements)) for x in operands)
    q_part, k_part, v_part = parts
    bias, limits, q_ids, k_ids = (
        None if x is None else _local_mask(x, operands[0], placements) for x in masks
    )
    local_masks = MaskOperands(bias, limits, q_ids, k_ids, known)
    lengths = q_len, kv_len
    out = _local(q_part, k_part, v_part, local_masks, lengths, scale, group)
    shape = torch.Size((*q.shape[:-1], v.shape[-1]))
    return DTensor.from_local(
        out,
        mesh,
        placements,
        run_check=False,
        shape=shape,
        stride=contiguous_strides(shape),
    )


define_composite(
    "masked_ulysses_attention(Tensor q, Tensor k, Tensor v, Tensor? bias, "
    "Tensor? limits, Tensor? q_ids, Tensor? k_ids, SymInt q_len, SymInt kv_len, "
    "float scale, str group, str known='') -> Tensor",
    masked_ulysses_attention,
)


def _local_mask(x: Tensor, q: DTensor, placements: list[Placement]) -> Tensor:
    """The part of a mask that belongs to the part of q with these placements."""
    (whole,) = as_dtensors((x,), q.device_mesh)
    own = mask_placements(placements, whole.shape)
    grads = gradient_placements(placements, own)
    return local_part(whole.redistribute(placements=own), grads)


def _local(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: MaskOperands,
    lengths: tuple[int, int],
    scale: float,
    group: str,
) -> Tensor:
    """The operator on this rank's chunks."""
    pg, name = group_by_name(group), "cp::masked_ulysses_attention"
    queries, keys = (
        Chunks(in_chunks(length, x.shape[2], pg.size()), pg.size())
        for length, x in zip(lengths, (q, k), strict=True)
    )
    check_operands(name, q, k, v, queries, keys, pg.rank())
    check_masks(name, q, masks, lengths)
    bias, *whole, known = masks
    if bias is not None:
        bias = _of_own_heads(bias, q.shape[1], queries, group)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor
        out, _ = masked_attention(q, k, v, bias, *whole, scale, known)
        return out

    sizes = queries.size, keys.size
    return with_exchanged_heads(
        attend, q, k, v, (queries.length, keys.length), sizes, group
    )


def _of_own_heads(bias: Tensor, heads: int, queries: Chunks, group: str) -> Tensor:
    """From rows of all heads to all rows of this rank's heads: [B or 1, heads, S, S].

    What says how heads are split are queries; here these are empty.
    """
    is_bool = bias.dtype == torch.bool
    rows = bias.to(torch.uint8) if is_bool else bias
    no_queries = rows.new_empty((rows.shape[0], heads, rows.shape[2], 0))
    lengths, sizes = [queries.length] * 2, [queries.size] * 2
    own: Tensor
    _, own = ulysses_scatter([no_queries, rows], lengths, sizes, group)
    return own.to(torch.bool) if is_bool else own
