"""Masked attention of this rank's rows on the keys of one source after another.

The operators differ in how keys come here; what is computed on them is the same, and is
here. Parts are those of Note [Parts of a mask].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cpcompile.geometry.blocks import Block
from cpcompile.geometry.key_ranges import KeyRanges
from cpcompile.geometry.known_masks import known_blocks
from cpcompile.geometry.mask_blocks import MaskBlocks, Part, Span, Tile, look
from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.steps.block_attention import row_dots, without_column
from cpcompile.ops.steps.dropout import Dropout
from cpcompile.ops.steps.masked_block import (
    mask_dtype,
    masked_block,
    masked_block_backward,
    masked_kernel,
    masked_math_backward,
)
from cpcompile.ops.steps.masked_vectors import VectorSteps
from cpcompile.ops.steps.math_attention import accumulation_dtype, finite
from cpcompile.ops.steps.online_softmax import RunningAttention
from cpcompile.ops.steps.position_bias import (
    add_bias_gradient,
    as_bias_gradient,
    own_bias,
    zero_bias_gradient,
)
from cpcompile.ops.steps.row_mask import (
    MASK_ELEMENTS,
    MaskOperands,
    RowMask,
    keys_of,
    rows_of,
)


@dataclass(frozen=True)
class Places:
    """Which tokens lie where: by rank its rows, and by source its keys, as spans.

    lengths: of the whole sequences, of queries and of keys.
    """

    rows: tuple[tuple[Span, ...], ...]
    keys: tuple[tuple[Span, ...], ...]
    rank: int
    lengths: tuple[int, int]

    @property
    def own(self) -> Sequence[Span]:
        """The rows of this rank."""
        return self.rows[self.rank]

    def positions(self, device: torch.device) -> Tensor:
        """Of the rows of this rank in their sequence, [R]."""
        parts = [torch.arange(x.position, x.stop, device=device) for x in self.own]
        return torch.cat(parts) if parts else torch.arange(0, device=device)


class Look(NamedTuple):
    """What one look at a mask says of this rank's rows. Note [One look at the mask].

    lower, upper: int64 [B or 1, rows], the range of keys of each row.
    table: which runs of keys its rows see, on the host, as MaskBlocks.of_table reads
        it; empty for a mask that has a name in known_masks.py.
    raised: [B or 1, H or 1, rows, 1], see Note [Rows of low numbers]; or empty.
    """

    lower: Tensor
    upper: Tensor
    table: Tensor
    raised: Tensor


@dataclass(frozen=True)
class _Form:
    """How parts are computed: by which kernel, and how large they are."""

    kernel: StepKernel
    tile: Tile
    vectors: bool  # whether the templates may compute whole sources

    @classmethod
    def of(cls, q: Tensor, v: Tensor, masks: MaskOperands, bias_grad: bool) -> _Form:
        bias = masks.bias
        kernel = masked_kernel(q, v, bias, masks.are_changes)
        copies = max(1 if x is None else x.shape[0] for x in masks[:4])
        if bias is not None:
            copies *= bias.shape[1]
        template = kernel is StepKernel.TEMPLATE
        if bias_grad or kernel is not StepKernel.FLASH:
            kernel, copies = StepKernel.MATH, q.shape[0] * q.shape[1]
        return cls(kernel, Tile.of(copies, MASK_ELEMENTS), template)


def tile_of(q: Tensor, v: Tensor, masks: MaskOperands, bias_grad: bool) -> Tile:
    """Into what the rows are cut."""
    return _Form.of(q, v, masks, bias_grad).tile


def look_at(
    q: Tensor,
    v: Tensor,
    masks: MaskOperands,
    places: Places,
    bias_grad: bool = False,
) -> Look:
    """The one look at the mask of a call, for all sources."""
    bias, key_ranges, q_segment_ids, kv_segment_ids, known = masks[:5]
    ids = (q_segment_ids, kv_segment_ids)
    ranges = KeyRanges.of(key_ranges, *ids, *places.lengths, q.device)
    own = places.positions(q.device)
    table = torch.zeros(0, dtype=torch.int64)
    if not known:
        tile = tile_of(q, v, masks, bias_grad)
        table = look(ranges, places.rows, places.keys, places.rank, tile)
    lower, upper = ranges.lower[:, own], ranges.upper[:, own]
    if q_segment_ids is not None:
        q_segment_ids = q_segment_ids[:, own]
    added = own_bias(bias, places.own, places.lengths)
    mask = RowMask(lower, upper, q_segment_ids, kv_segment_ids, added)
    raised = q.new_zeros(0) if mask.highest is None else mask.highest
    return Look(lower, upper, table, raised)


def mask_blocks(
    q: Tensor,
    v: Tensor,
    masks: MaskOperands,
    places: Places,
    seen: Look,
    bias_grad: bool = False,
) -> MaskBlocks:
    """Which parts of the scores a rank computes; arguments are those of `look_at`."""
    _, key_ranges, q_ids, kv_ids, known = masks[:5]
    form = _Form.of(q, v, masks, bias_grad)
    cut_all = masks.bias is not None or form.kernel is StepKernel.MATH
    cut = (places.rows, places.keys, places.rank, form.tile, cut_all)
    if not known:
        return MaskBlocks.of_table(seen.table, *cut)
    blocks = known_blocks(known, *cut)
    if blocks is None:  # it is not kept any more
        whole = (key_ranges, q_ids, kv_ids, *places.lengths, q.device)
        blocks = MaskBlocks.of(KeyRanges.of(*whole), *cut)
    return blocks


@dataclass(frozen=True)
class MaskedRows:
    """What one rank computes: which parts, their masks, and how.

    vectors: computes whole sources, in place of parts by `kernel`.
    """

    mask: RowMask
    blocks: MaskBlocks
    scale: float
    kernel: StepKernel
    vectors: VectorSteps | None
    softcap: float
    dropout: Dropout | None

    @classmethod
    def of(
        cls,
        q: Tensor,
        v: Tensor,
        masks: MaskOperands,
        places: Places,
        seen: Look,
        scale: float,
        bias_grad: bool = False,
    ) -> MaskedRows:
        """For the rows of `places.rank`.

        seen: what `look_at` found. bias_grad: the gradient of the bias is wanted, which
        plain math alone has.
        """
        bias, _, q_segment_ids, kv_segment_ids = masks[:4]
        form = _Form.of(q, v, masks, bias_grad)
        blocks = mask_blocks(q, v, masks, places, seen, bias_grad)
        if blocks.has_holes and q_segment_ids is not None:
            q_segment_ids = q_segment_ids[:, places.positions(q.device)]
        else:
            q_segment_ids = kv_segment_ids = None
        limits, ids = (seen.lower, seen.upper), (q_segment_ids, kv_segment_ids)
        added = own_bias(bias, places.own, places.lengths)
        mask = RowMask(*limits, *ids, added, seen.raised)
        dropout = None
        if masks.seeds is not None:
            dropout = Dropout(masks.dropout_p, masks.seeds, places.positions(q.device))
        vectors = None
        if form.vectors and blocks.ordered and not blocks.has_holes:
            vectors = VectorSteps(*limits, places.keys, scale, masks.softcap, dropout)
        how = (scale, form.kernel, vectors, masks.softcap, dropout)
        return cls(mask, blocks, *how)

    def forward(
        self, running: RunningAttention, k: Tensor, v: Tensor, source: int
    ) -> None:
        """Add what the rows of `running` find in the keys of a source."""
        if self.vectors is not None:
            if self.blocks.sees(source):
                self.vectors.forward(running, k, v, source)
            return
        dtype = mask_dtype(running.q, self.kernel)
        q = self.mask.without_lost(running.q)
        for part in self.blocks.parts(source):
            operands = (rows_of(q, part), keys_of(k, part), keys_of(v, part))
            mask = self.mask.of_part(part, dtype)
            found = masked_block(
                *(*operands, mask, self.scale, self.kernel, self.softcap),
                self.factors(part, q.dtype),
            )
            block = Block(part.row, part.rows, part.key, part.keys, False)
            running.merge(block, *found)

    def factors(self, part: Part, dtype: torch.dtype) -> Tensor | None:
        """Those of dropout, in the accumulation dtype."""
        if self.dropout is None:
            return None
        return self.dropout.factors(part, accumulation_dtype(dtype))


class MaskedGradients:
    """The gradients of this rank's rows, which grow with every source.

    dq: [B, H, R, D] in the accumulation dtype. dbias: like the bias, and its broadcast
    dimensions are summed; without elements unless asked for; of positions it is in the
    accumulation dtype, until `result`. grad, out: as with_column gives them.
    """

    def __init__(
        self,
        rows: MaskedRows,
        grad: Tensor,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        bias_grad: bool,
    ) -> None:
        self.rows = rows
        self.grad, self.out = grad, out
        self.q = rows.mask.without_lost(q)
        self.lse = finite(lse)
        self.delta = row_dots(grad, out) if rows.kernel is StepKernel.MATH else None
        self.dq = q.new_zeros(q.shape, dtype=accumulation_dtype(q.dtype))
        self.dbias = zero_bias_gradient(q, rows.mask.bias, bias_grad)

    def of_source(self, k: Tensor, v: Tensor, source: int) -> list[Tensor]:
        """dk and dv of the keys of a source, in the accumulation dtype."""
        vectors = self.rows.vectors
        if vectors is not None and self.rows.blocks.sees(source):
            assert self.delta is not None, "the step kernels read delta"
            saved = (without_column(self.grad, v), self.q, self.lse, self.delta)
            self.dq, dk, dv = vectors.backward(saved, self.dq, k, v, source)
            return [dk, dv]
        dtype = accumulation_dtype(k.dtype)
        dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (k, v))
        for part in self.rows.blocks.parts(source):
            found = self._of_part(part, keys_of(k, part), keys_of(v, part))
            rows_of(self.dq, part).add_(found[0])
            keys_of(dk, part).add_(found[1])
            keys_of(dv, part).add_(found[2])
        return [dk, dv]

    def result(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a backward returns, given dk and dv of this rank: dq, dk, dv, dbias."""
        dq = self.rows.mask.without_lost(self.dq)
        dbias = as_bias_gradient(self.dbias, self.rows.mask.bias)
        return dq.to(self.q.dtype), dk, dv, dbias

    def _of_part(
        self, part: Part, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        call = self.rows
        mask = call.mask.of_part(part, mask_dtype(self.q, call.kernel))
        grad, q, out = (rows_of(x, part) for x in (self.grad, self.q, self.out))
        lse = rows_of(self.lse, part)
        if self.delta is None:
            operands = (grad, q, k, v, out, lse, mask)
            return masked_block_backward(*operands, call.scale, call.kernel)
        delta, grad = rows_of(self.delta, part), without_column(grad, v)
        dq, dk, dv, ds = masked_math_backward(
            *(grad, q, k, v, delta, lse, mask, call.scale, call.softcap),
            call.factors(part, q.dtype),
        )
        add_bias_gradient(self.dbias, call.mask.bias, part, ds)
        return dq, dk, dv
