"""cp::split_kv_attention: every rank attends from all queries to its own keys.

    out_r, lse_r = attention(q, keys of rank r);  out = their merge, on every rank

For a few queries over many keys, as a token that is decoded has them: neither the keys
nor the queries move, only the partial results do, in one collective. It is flash
decoding (Dao et al. 2023), with the ranks of a group in the place of thread blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpcompile.geometry.blocks import Block
from cpcompile.geometry.key_ranges import KeyRanges
from cpcompile.geometry.layout import Layout, Runs
from cpcompile.geometry.mask_blocks import spans
from cpcompile.geometry.mask_parts import MaskPart, TokenSpan
from cpcompile.geometry.visibility import visible_chunk
from cpcompile.kernels.choice import StepKernel, step_kernel
from cpcompile.ops.comm.communication import all_gather_chunks, group_by_name
from cpcompile.ops.step.attention_step import attention_step
from cpcompile.ops.step.dropout import Dropout
from cpcompile.ops.step.masked_block import mask_dtype, masked_block, masked_kernel
from cpcompile.ops.step.masked_vectors import VectorSteps
from cpcompile.ops.step.math_attention import accumulation_dtype, finite
from cpcompile.ops.step.online_softmax import RunningAttention
from cpcompile.ops.step.position_bias import own_bias
from cpcompile.ops.step.row_changes import RowModifiers
from cpcompile.ops.step.row_mask import MASK_ELEMENTS, MaskOperands, RowMask, keys_of
from cpcompile.ops.step.score_mod import ScoreMod
from cpcompile.ops.strategies.contract import check_masks, check_operands
from cpcompile.ops.strategies.sinks import with_sinks

HELD_ELEMENTS = MASK_ELEMENTS  # of keys and values, where they are converted


@torch.library.custom_op("cp::split_kv_attention", mutates_args=())
def split_kv_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_len: int,
    kv_len: int,
    is_causal: bool,
    scale: float,
    group: str,
    bias: Tensor | None = None,
    key_ranges: Tensor | None = None,
    q_segment_ids: Tensor | None = None,
    kv_segment_ids: Tensor | None = None,
    known: str = "",
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seeds: Tensor | None = None,
    score_mod: str = "",
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from q, which every rank has, to keys that are sharded on `group`.

    Args: as those of cp::ring_attention, but for q [B, H, q_len, D] and the bias [B or
        1, H or 1, q_len, kv_len], which are whole on every rank.

    Returns: out [B, H, q_len, E] in q's dtype and lse [B, H, q_len], the same on every
    rank. There is no gradient.

    Raises: ValueError for operands or masks of other shapes.
    """
    name, lengths = "cp::split_kv_attention", (q_len, kv_len)
    pg = group_by_name(group)
    keys = Runs.contiguous(kv_len, pg.size())
    queries = Runs.contiguous(q_len, pg.size())
    check_operands(name, q, k, v, queries, keys, pg.rank(), whole_queries=True)
    fields = (bias, key_ranges, q_segment_ids, kv_segment_ids)
    changes = (softcap, dropout_p, seeds)
    masks = MaskOperands.of(fields, known, *changes, score_mod=score_mod)
    raised = None
    if masks.are_given:
        check_masks(name, q, masks, lengths, is_causal)
        mask = _mask(q, masks, lengths)
        raised = mask.highest
        found = _under_mask(q, k, v, masks, mask, lengths, scale, keys, pg.rank())
    else:
        start = keys.start(pg.rank())
        count = k.shape[2]
        seen = visible_chunk(0, q_len, start, count, kv_len, bool(is_causal))
        kernel = step_kernel(q.device.type, q.dtype, q.shape[-1], v.shape[-1])
        nothing = (None,) * 4
        limits = seen.to_lists()
        found = attention_step(q, k, v, *nothing, *limits, scale, False, kernel.value)
    if pg.size() == 1:
        return with_sinks(found[0].to(q.dtype), found[1], sinks, raised)
    where = f"{name} on rank {pg.rank()} of {pg.size()} in group {group!r}"
    out, lse = found
    packed = torch.cat([out, lse.unsqueeze(-1)], -1)
    parts = all_gather_chunks(packed.flatten(), pg, where)
    parts = parts.view(pg.size(), *packed.shape)
    merged = _merged(parts[..., :-1], parts[..., -1], q.dtype)
    return with_sinks(*merged, sinks, raised)


@split_kv_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object
) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))


def _merged(outs: Tensor, lses: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merge the parts [ranks, ...] to one softmax; Note [Merging two softmaxes]."""
    lse = lses.logsumexp(0)
    weights = (lses - finite(lse)).exp().unsqueeze(-1)
    # A part without keys is 0, whatever its weight; Inf * 0 of others would be NaN.
    weighted = torch.where(weights == 0, 0.0, outs * weights)
    return weighted.sum(0).to(dtype), lse


def _mask(q: Tensor, masks: MaskOperands, lengths: tuple[int, int]) -> RowMask:
    """Make the mask of all rows, which every rank has."""
    _, key_ranges, q_ids, kv_ids = masks[:4]
    ranges = KeyRanges.of(key_ranges, q_ids, kv_ids, *lengths, q.device)
    added = own_bias(masks.added, (TokenSpan(0, 0, lengths[0]),), lengths)
    return RowMask(ranges.lower, ranges.upper, q_ids, kv_ids, added)


def _under_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: MaskOperands,
    mask: RowMask,
    lengths: tuple[int, int],
    scale: float,
    keys: Runs,
    rank: int,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) on this rank's keys, in the accumulation dtype.

    Rows are few, so that the mask is made for all of them at once: to look which keys
    they see would have the host wait for the device.
    """
    bias, q_ids = masks.bias, masks.q_segment_ids
    kernel = masked_kernel(q, v, bias, masks.are_changes, masks.has_table)
    at = torch.arange(lengths[0], device=q.device)
    running = RunningAttention(q, v.shape[-1])
    if not k.shape[2]:
        return running.result(False)
    dropout = None
    if masks.seeds is not None:
        dropout = Dropout(masks.dropout_p, masks.seeds, at)
    if kernel is StepKernel.TEMPLATE and q_ids is None and lengths[0] == 1:
        sources = range(keys.ranks)
        runs = [spans(Layout.CONTIGUOUS, keys, source) for source in sources]
        changes = RowModifiers.of(mask, masks.softcap, dropout)
        steps = VectorSteps(mask.lower, mask.upper, runs, scale, changes)
        steps.forward(running, mask.without_lost(q), k, v, rank)
        return running.result(False)
    rows, count = lengths[0], k.shape[2]
    score_mod = None
    if masks.score_mod and bias is not None:
        score_mod = ScoreMod(masks.score_mod, bias, at)
    q = mask.without_lost(q)
    most = count
    if kernel is not StepKernel.FLASH:  # plain math holds keys in float32
        kernel = StepKernel.MATH
        most = max(HELD_ELEMENTS // (k[:, :, 0].numel() + v[:, :, 0].numel()), 1)
    for key in range(0, count, most):
        block = Block(0, rows, key, min(most, count - key), False)
        part = MaskPart(0, rows, key, block.keys, keys.start(rank) + key, masked=True)
        shown = mask.of_part(part, mask_dtype(q, kernel))
        own = keys_of(k, part), keys_of(v, part)
        factors = None
        if dropout is not None:
            factors = dropout.factors(part, accumulation_dtype(q.dtype))
        found = masked_block(
            *(q, *own, shown, scale, kernel, masks.softcap, factors),
            None if score_mod is None else score_mod.of_part(part),
        )
        running.merge(block, *found)
    return running.result(False)
