"""cp::all_gather_attention: keys and values are gathered once, queries stay.

One collective instead of N - 1 hops and one or two kernel calls instead of N, for the
memory of the whole keys and values. Method: the context parallelism of Llama 3 (arXiv
2407.21783, section 3.3.2). The backward gathers again and reduce-scatters dK and dV.

Note [Gathered keys in their own order]
Gathered keys are put in the order of the sequence, so that a run of consecutive queries
sees a rectangle and a triangle of them. In the zigzag layout the local queries are two
such runs, and there is one step for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cpcompile.geometry.layout import Chunks, Runs, TokenLayout
from cpcompile.geometry.mask_blocks import Span, spans
from cpcompile.geometry.visibility import visible_chunk
from cpcompile.kernels.choice import StepKernel, step_kernel
from cpcompile.ops.attention.contract import (
    check_masks,
    check_operands,
    dealt_tokens,
    mask_layout,
    register,
)
from cpcompile.ops.comm.communication import (
    Packing,
    all_gather_chunks,
    group_by_name,
    reduce_scatter_chunks,
)
from cpcompile.ops.steps.attention_step import attention_step
from cpcompile.ops.steps.attention_step_backward import (
    attention_step_backward,
    attention_step_dkdv,
    attention_step_dq,
)
from cpcompile.ops.steps.block_attention import row_dots
from cpcompile.ops.steps.masked_steps import (
    MaskedGradients,
    MaskedRows,
    Places,
    look_at,
    new_bias_gradient,
)
from cpcompile.ops.steps.online_softmax import RunningAttention
from cpcompile.ops.steps.row_mask import MaskOperands
from cpcompile.plans import Strategy

Run = tuple[int, int]  # a position in the sequence, and the number of tokens from there


@dataclass(frozen=True)
class Gathered:
    """What one rank needs to know; see Note [Gathered keys in their own order]."""

    name: str
    queries: Chunks
    keys: Chunks
    is_causal: bool
    group: str
    rank: int
    tokens: TokenLayout | None  # None: as queries and keys say

    @classmethod
    def of(
        cls,
        name: str,
        operands: tuple[Tensor, Tensor, Tensor],
        lengths: tuple[int, int],
        is_causal: bool,
        group: str,
        layout: str,
    ) -> Gathered:
        """Raises ValueError for operands that are not this rank's tokens."""
        pg = group_by_name(group)
        queries, keys = (Chunks(length, pg.size()) for length in lengths)
        causal = bool(is_causal)
        tokens = dealt_tokens(Strategy.ALL_GATHER, layout, queries, keys, causal)
        check_operands(name, *operands, queries, keys, pg.rank())
        return cls(name, queries, keys, causal, group, pg.rank(), tokens)

    @property
    def place(self) -> str:
        """Names the operator and the rank, for messages."""
        ranks = self.keys.ranks
        return f"{self.name} on rank {self.rank} of {ranks} in group {self.group!r}"

    def runs(self, chunks: Chunks, rank: int) -> tuple[Run, ...]:
        """The runs of consecutive tokens of a rank."""
        if self.tokens is None:
            return ((chunks.start(rank), chunks.count(rank)),)
        head, count = self.tokens.head(rank), self.tokens.count(rank)
        return (self.tokens.first(rank), head), (self.tokens.tail(rank), count - head)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """The runs of local queries, [B, H, tokens, ...] each."""
        counts = [count for _, count in self.runs(self.queries, self.rank)]
        return (x,) if len(counts) == 1 else x.split(counts, 2)

    def limits(self) -> list[tuple[list[int], ...]]:
        """What each run of local queries sees of all keys, as the operators take it."""
        length = self.keys.length
        return [
            visible_chunk(*run, 0, length, length, self.is_causal).to_lists()
            for run in self.runs(self.queries, self.rank)
        ]

    def order(self) -> list[tuple[int, int, int, int]]:
        """Every run of keys in the order of the sequence.

        It is where it starts, its rank, where it starts there, and its tokens.
        """
        found = []
        for rank in range(self.keys.ranks):
            place = 0
            for start, count in self.runs(self.keys, rank):
                found.append((start, rank, place, count))
                place += count
        return sorted(found)


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
    layout: str = "contiguous",
    bias: Tensor | None = None,
    key_ranges: Tensor | None = None,
    q_segment_ids: Tensor | None = None,
    kv_segment_ids: Tensor | None = None,
    known: str = "",
) -> tuple[Tensor, Tensor]:
    """Attention over a sequence sharded on `group`, on gathered keys and values.

    Arguments, results and errors are those of cp::ring_attention; the layout is
    contiguous or zigzag.
    """
    name, lengths = "cp::all_gather_attention", (q_len, kv_len)
    masks = MaskOperands(bias, key_ranges, q_segment_ids, kv_segment_ids, known)
    if masks.are_given:
        call = (name, (q, k, v), masks, lengths, is_causal, scale, group, layout)
        own, rows = _under_mask(*call)
        running = RunningAttention(q, v.shape[-1])
        rows.forward(running, *gather_keys(k, v, own), 0)
        return running.result(True)
    own = Gathered.of(name, (q, k, v), lengths, is_causal, group, layout)
    k_full, v_full = gather_keys(k, v, own)
    kernel = step_kernel(q.device.type, q.dtype, q.shape[-1], v.shape[-1]).value
    results = [
        attention_step(
            *(part, k_full, v_full, None, None, None, None, *limits),
            *(scale, True, kernel),
        )
        for part, limits in zip(own.split(q), own.limits(), strict=True)
    ]
    outs, lses = zip(*results, strict=True)
    return _joined(outs), _joined(lses)


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
    layout: str = "contiguous",
    bias: Tensor | None = None,
    key_ranges: Tensor | None = None,
    q_segment_ids: Tensor | None = None,
    kv_segment_ids: Tensor | None = None,
    known: str = "",
    bias_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv, dbias), see cp::ring_attention_backward.

    Sums over blocks and over ranks are in the accumulation dtype.
    """
    name, lengths = "cp::all_gather_attention_backward", (q_len, kv_len)
    masks = MaskOperands(bias, key_ranges, q_segment_ids, kv_segment_ids, known)
    if masks.are_given:
        call = (name, (q, k, v), masks, lengths, is_causal, scale, group, layout)
        own, rows = _under_mask(*call, bias_grad)
        found = MaskedGradients(rows, grad, q, out, lse, bias_grad)
        totals = found.of_source(*gather_keys(k, v, own), 0)
        return found.result(*scatter_gradients(totals, k, v, own))
    own = Gathered.of(name, (q, k, v), lengths, is_causal, group, layout)
    k_full, v_full = gather_keys(k, v, own)
    kernel = step_kernel(q.device.type, q.dtype, q.shape[-1], v.shape[-1])
    split = kernel is StepKernel.TEMPLATE
    saved = (grad, q, row_dots(grad, out) if split else out, lse)
    dqs: list[Tensor] = []
    sums: list[Tensor] = []
    parts = zip(*map(own.split, saved), own.limits(), strict=True)
    for grad_part, q_part, out_part, lse_part, limits in parts:
        if split:
            operands = (grad_part, q_part, k_full, v_full, lse_part, out_part)
            rest = (None, None, *limits, scale)
            before = (*sums,) or (None, None)
            sums = list(
                attention_step_dkdv(*operands, *before, *rest, False, kernel.value)
            )
            dqs.append(attention_step_dq(*operands, None, *rest, True, kernel.value))
        else:
            dq, *new = attention_step_backward(
                *(grad_part, q_part, k_full, v_full, out_part, lse_part, None),
                *(*limits, scale, True, kernel.value),
            )
            dqs.append(dq)
            sums = list(map(torch.add, sums, new)) if sums else new
    dk, dv = scatter_gradients(sums, k, v, own)
    return _joined(dqs), dk, dv, new_bias_gradient(q, None, False)


def _under_mask(
    name: str,
    operands: tuple[Tensor, Tensor, Tensor],
    masks: MaskOperands,
    lengths: tuple[int, int],
    is_causal: bool,
    scale: float,
    group: str,
    layout: str,
    bias_grad: bool = False,
) -> tuple[Gathered, MaskedRows]:
    """How keys are gathered, and what this rank computes on all that its rows see."""
    q, _, v = operands
    order = mask_layout(Strategy.ALL_GATHER, layout, lengths, masks.bias)
    # As for causal attention: keys in the order of the sequence.
    own = Gathered.of(name, operands, lengths, True, group, layout)
    check_masks(name, q, masks, lengths, is_causal)
    queries = Runs.contiguous(lengths[0], own.queries.ranks)
    places = Places(
        rows=tuple(spans(order, queries, each) for each in range(queries.ranks)),
        keys=((Span(0, 0, lengths[1]),) if lengths[1] else (),),
        rank=own.rank,
        lengths=lengths,
    )
    seen = look_at(q, v, masks, places, bias_grad)
    return own, MaskedRows.of(q, v, masks, places, seen, scale, bias_grad)


def gather_keys(k: Tensor, v: Tensor, own: Gathered) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole sequence, [B, G, kv_len, dim]."""
    if own.keys.ranks == 1:
        return k, v
    packing = Packing.of(k, v, own.keys.size)
    pg = group_by_name(own.group)
    gathered = all_gather_chunks(packing.pack(k, v), pg, own.place)
    views = zip(*map(packing.views, gathered.unbind(0)), strict=True)
    order = own.order()
    k_full, v_full = (
        torch.cat([x[rank].narrow(2, at, n) for _, rank, at, n in order], 2)
        for x in views
    )
    return k_full, v_full


def scatter_gradients(
    totals: list[Tensor], k: Tensor, v: Tensor, own: Gathered
) -> tuple[Tensor, Tensor]:
    """This rank's part of the sums over ranks of `totals`, in the dtypes of k and v."""
    packing, pg = Packing.of(k, v, own.keys.size), group_by_name(own.group)
    shape = (own.keys.ranks, packing.numel)
    is_full = own.keys.length == own.keys.size * own.keys.ranks
    buffers = totals[0].new_empty(shape) if is_full else totals[0].new_zeros(shape)
    views = zip(*map(packing.views, buffers.unbind(0)), strict=True)
    for total, chunks in zip(totals, views, strict=True):
        for start, rank, place, count in own.order():
            chunks[rank].narrow(2, place, count).copy_(total.narrow(2, start, count))
    alone = own.keys.ranks == 1
    mine = buffers[0] if alone else reduce_scatter_chunks(buffers, pg, own.place)
    dk, dv = (
        total.narrow(2, 0, x.shape[2]).to(x.dtype, copy=True).contiguous()
        for total, x in zip(packing.views(mine), (k, v), strict=True)
    )
    return dk, dv


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The inverse of Gathered.split."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 2)


register(all_gather_attention, all_gather_attention_backward)
