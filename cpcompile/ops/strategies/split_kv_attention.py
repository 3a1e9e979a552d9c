"""cp::split_kv_attention: every rank attends from all queries to its own keys.

    out_r, lse_r = attention(q, keys of rank r);  out = their merge, on every rank

For a few queries over many keys, as a token that is decoded has them: neither the keys
nor the queries move, only the partial results do, in one collective. It is flash
decoding (Dao et al. 2023), with the ranks of a group in the place of thread blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cpcompile.geometry.blocks import Block
from cpcompile.geometry.key_ranges import KeyRanges
from cpcompile.geometry.layout import Layout, Runs
from cpcompile.geometry.mask_blocks import spans
from cpcompile.geometry.mask_tiles import TokenSpan
from cpcompile.geometry.visibility import visible_chunk
from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.attention_spec import AttentionInputs
from cpcompile.ops.comm.communication import all_gather_chunks, group_by_name
from cpcompile.ops.step.attention_step import attention_step
from cpcompile.ops.step.dropout import Dropout
from cpcompile.ops.step.kernel_choice import call_kernel, masked_kernel
from cpcompile.ops.step.math_attention import HIDDEN
from cpcompile.ops.step.online_softmax import RunningAttention
from cpcompile.ops.step.position_bias import own_bias
from cpcompile.ops.step.row_changes import RowModifiers
from cpcompile.ops.step.row_mask import MASK_ELEMENTS, RowMask
from cpcompile.ops.step.row_work import RowWork
from cpcompile.ops.step.score_mod import ScoreMod
from cpcompile.ops.step.step_arguments import StepChunk
from cpcompile.ops.step.template_steps import TemplateSteps
from cpcompile.ops.strategies.contract import (
    check_inputs,
    check_layout,
    check_operands,
    fake_results,
)
from cpcompile.ops.strategies.sinks import with_sinks

HELD_ELEMENTS = MASK_ELEMENTS  # of keys and values, where they are converted


@torch.library.custom_op("cp::split_kv_attention", mutates_args=())
def split_kv_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Sequence[Tensor],
    sizes: Sequence[int],
    spec: str,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Attend from q, which every rank has, to keys that are sharded on `group`.

    Args: as those of cp::ring_attention, but for q [B, H, q_len, D] and the bias [B or
        1, H or 1, q_len, kv_len], which are whole on every rank.

    Returns: out [B, H, q_len, E] in q's dtype and lse [B, H, q_len], the same on every
    rank. There is no gradient.

    Raises: ValueError for operands or masks of other shapes.
    """
    name, inputs = "cp::split_kv_attention", AttentionInputs.of(spec, extras)
    check_layout(name, inputs.spec.layout)
    q_len, kv_len = lengths = (sizes[0], sizes[1])
    pg = group_by_name(group)
    keys = Runs.contiguous(kv_len, pg.size())
    queries = Runs.contiguous(q_len, pg.size())
    check_operands(name, q, k, v, queries, keys, pg.rank(), whole_queries=True)
    rank, row_shift = pg.rank(), None
    running = RunningAttention(q, v.shape[-1])
    if inputs.has_modifiers:
        check_inputs(name, q, inputs, lengths)
        work = _masked_work(q, k, v, inputs, lengths, keys, rank)
        work.forward(running, k, v)
        row_shift = None if work.mask is None else work.mask.row_shift
        own_out, own_lse = running.result(False)
    else:
        start, count, is_causal = keys.start(rank), k.shape[2], inputs.spec.is_causal
        visible = visible_chunk(0, q_len, start, count, kv_len, is_causal)
        arguments = StepChunk.plain(inputs.spec.scale, visible).arguments()
        kernel = call_kernel(q, v, inputs)
        own_out, own_lse = attention_step(
            q, k, v, None, None, *arguments, False, kernel.value
        )
    if pg.size() == 1:
        return with_sinks(own_out.to(q.dtype), own_lse, inputs.sinks, row_shift)
    where = f"{name} on rank {rank} of {pg.size()} in group {group!r}"
    packed = torch.cat([own_out, own_lse.unsqueeze(-1)], -1)
    parts = all_gather_chunks(packed.flatten(), pg, where)
    parts = parts.view(pg.size(), *packed.shape)
    merged = _merged(parts[..., :-1], parts[..., -1], q.dtype)
    return with_sinks(*merged, inputs.sinks, row_shift)


split_kv_attention.register_fake(fake_results)


def _merged(outs: Tensor, lses: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merge the parts [ranks, ...] to one softmax; Note [Merging two softmaxes]."""
    lse = lses.logsumexp(0)
    # Not exp(lses - lse), as in math_forward.
    weights = lses.softmax(0).masked_fill_(lses == HIDDEN, 0).unsqueeze(-1)
    # A part without keys is 0, whatever its weight; Inf * 0 of others would be NaN.
    weighted = torch.where(weights == 0, 0.0, outs * weights)
    return weighted.sum(0).to(dtype), lse


def _mask(q: Tensor, inputs: AttentionInputs, lengths: tuple[int, int]) -> RowMask:
    """Make the mask of all rows, which every rank has."""
    _, key_ranges, q_ids, kv_ids = inputs.masks
    ranges = KeyRanges.of(key_ranges, q_ids, kv_ids, *lengths, q.device)
    added = own_bias(inputs.added, (TokenSpan(0, 0, lengths[0]),), lengths)
    return RowMask(ranges.lower, ranges.upper, q_ids, kv_ids, added)


def _masked_work(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: AttentionInputs,
    lengths: tuple[int, int],
    keys: Runs,
    rank: int,
) -> RowWork:
    """Set up the work on this rank's keys.

    Rows are few, so that the mask is made for all of them at once: to summarize which
    keys they see would have the host wait for the device.
    """
    bias, spec = inputs.bias, inputs.spec
    mask, rows, count = _mask(q, inputs, lengths), lengths[0], k.shape[2]
    positions = torch.arange(rows, device=q.device)
    kernel = masked_kernel(q, v, bias, spec.changes_scores, inputs.has_table)
    dropout = score_mod = None
    if inputs.seeds is not None:
        dropout = Dropout(spec.dropout_p, inputs.seeds, positions)
    if spec.score_mod and bias is not None:
        score_mod = ScoreMod(spec.score_mod, bias, positions)
    if kernel is StepKernel.TEMPLATE and inputs.q_segment_ids is None and rows == 1:
        templates = None
        if count:
            modifiers = RowModifiers.of(mask, spec.softcap, dropout)
            own_keys = spans(Layout.CONTIGUOUS, keys, rank)
            chunk = (q, count, own_keys, spec.scale)
            templates = TemplateSteps.of_mask(mask, modifiers, *chunk)
        return RowWork(StepKernel.MATH, spec.scale, templates=templates, mask=mask)
    most = max(count, 1)
    if kernel is not StepKernel.FLASH:  # plain math holds keys in float32
        kernel = StepKernel.MATH
        of_key = k[:, :, :1].numel() + v[:, :, :1].numel()
        most = max(HELD_ELEMENTS // max(of_key, 1), 1)
    start = keys.start(rank)
    blocks = [
        Block(0, rows, key, min(most, count - key), position=start + key, masked=True)
        for key in range(0, count, most)
    ]
    changes = (spec.softcap, dropout, score_mod)
    return RowWork(kernel, spec.scale, blocks, None, mask, (), *changes)
