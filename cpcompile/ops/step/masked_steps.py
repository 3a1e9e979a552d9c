"""Masked attention of this rank's rows on the keys of one source after another.

The operators differ in how keys come here; what is computed on them is the same, and is
here. Parts are those of Note [Parts of a mask] in mask_parts.py.
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
from cpcompile.geometry.mask_blocks import MaskBlocks, look
from cpcompile.geometry.mask_parts import MaskPart, Tile, TokenSpan
from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.attention_spec import AttentionInputs
from cpcompile.ops.step.block_attention import (
    block_attention,
    mask_dtype,
    masked_kernel,
)
from cpcompile.ops.step.dropout import Dropout
from cpcompile.ops.step.masked_vectors import VectorSteps
from cpcompile.ops.step.math_attention import accumulation_dtype
from cpcompile.ops.step.online_softmax import RunningAttention
from cpcompile.ops.step.position_bias import own_bias
from cpcompile.ops.step.row_changes import RowModifiers
from cpcompile.ops.step.row_mask import MASK_ELEMENTS, RowMask, keys_of, rows_of
from cpcompile.ops.step.score_mod import ScoreMod, ScorePart


@dataclass(frozen=True)
class TokenSpans:
    """The tokens of all ranks as spans: by rank its rows, and by source its keys.

    lengths: of the whole sequences, of queries and of keys.
    """

    rows: tuple[tuple[TokenSpan, ...], ...]
    keys: tuple[tuple[TokenSpan, ...], ...]
    rank: int
    lengths: tuple[int, int]

    @property
    def own(self) -> Sequence[TokenSpan]:
        """Rows of this rank."""
        return self.rows[self.rank]

    def positions(self, device: torch.device) -> Tensor:
        """Return the positions of the rows of this rank in their sequence, [R]."""
        parts = [torch.arange(x.position, x.stop, device=device) for x in self.own]
        return torch.cat(parts) if parts else torch.arange(0, device=device)


class MaskSummary(NamedTuple):
    """The result of one look at a mask for this rank; Note [One look at the mask].

    lower, upper: int64 [B or 1, rows], the range of keys of each row.
    table: which runs of keys the rows of all ranks see, on the host, as
        MaskBlocks.of_table reads it; empty for a mask with a name in known_masks.py.
    raised: [B or 1, H or 1, rows, 1], see Note [Rows of low numbers]; or empty.
    """

    lower: Tensor
    upper: Tensor
    table: Tensor
    raised: Tensor


@dataclass(frozen=True)
class _Form:
    """The way to compute parts: the kernel, and how large they are."""

    kernel: StepKernel
    tile: Tile
    vectors: bool  # whether the templates may compute whole sources

    @classmethod
    def of(
        cls, q: Tensor, v: Tensor, inputs: AttentionInputs, bias_grad: bool
    ) -> _Form:
        bias = inputs.bias
        functions = inputs.inlined(bias_grad)
        kernel = masked_kernel(
            *(q, v, None if functions else bias),
            *(inputs.spec.changes_scores, inputs.has_table),
        )
        copies = max(1 if x is None else x.shape[0] for x in inputs.masks)
        if bias is not None:
            copies *= bias.shape[1]
        template = kernel is StepKernel.TEMPLATE
        if bias_grad or kernel is not StepKernel.FLASH:
            kernel, copies = StepKernel.MATH, q.shape[0] * q.shape[1]
        return cls(kernel, Tile.of(copies, MASK_ELEMENTS), template)


def tile_of(q: Tensor, v: Tensor, inputs: AttentionInputs, bias_grad: bool) -> Tile:
    """Return the tile that rows are cut into."""
    return _Form.of(q, v, inputs, bias_grad).tile


def summarize_mask(
    q: Tensor,
    v: Tensor,
    inputs: AttentionInputs,
    places: TokenSpans,
    bias_grad: bool = False,
) -> MaskSummary:
    """Look at the mask of a call once, for all sources."""
    q_segment_ids = inputs.q_segment_ids
    ids = (q_segment_ids, inputs.kv_segment_ids)
    ranges = KeyRanges.of(inputs.key_ranges, *ids, *places.lengths, q.device)
    own = places.positions(q.device)
    table = torch.zeros(0, dtype=torch.int64)
    if not inputs.spec.mask_key:
        tile = tile_of(q, v, inputs, bias_grad)
        table = look(ranges, places.rows, places.keys, places.rank, tile)
    lower, upper = ranges.lower[:, own], ranges.upper[:, own]
    if q_segment_ids is not None:
        q_segment_ids = q_segment_ids[:, own]
    added = own_bias(inputs.added, places.own, places.lengths)
    mask = RowMask(lower, upper, q_segment_ids, inputs.kv_segment_ids, added)
    raised = q.new_zeros(0) if mask.highest is None else mask.highest
    return MaskSummary(lower, upper, table, raised)


def mask_blocks(
    q: Tensor,
    v: Tensor,
    inputs: AttentionInputs,
    places: TokenSpans,
    seen: MaskSummary,
    bias_grad: bool = False,
) -> MaskBlocks:
    """Return the parts that a rank computes; arguments as of `summarize_mask`."""
    form = _Form.of(q, v, inputs, bias_grad)
    cut_all = inputs.bias is not None or form.kernel is StepKernel.MATH
    cut = (places.rows, places.keys, places.rank, form.tile, cut_all)
    if not inputs.spec.mask_key:
        return MaskBlocks.of_table(seen.table, *cut)
    blocks = known_blocks(inputs.spec.mask_key, *cut)
    if blocks is None:  # it is not kept any more
        _, limits, q_ids, kv_ids = inputs.masks
        ranges = KeyRanges.of(limits, q_ids, kv_ids, *places.lengths, q.device)
        blocks = MaskBlocks.of(ranges, *cut)
    return blocks


@dataclass(frozen=True)
class MaskedRows:
    """The work of one rank under a mask: which parts, their masks, and how.

    vectors: computes whole sources, in place of parts by `kernel`.
    """

    mask: RowMask
    blocks: MaskBlocks
    keys: tuple[tuple[TokenSpan, ...], ...]  # of every source, as Places has them
    scale: float
    kernel: StepKernel
    vectors: VectorSteps | None
    softcap: float
    dropout: Dropout | None
    score_mod: ScoreMod | None

    @classmethod
    def of(
        cls,
        q: Tensor,
        v: Tensor,
        inputs: AttentionInputs,
        places: TokenSpans,
        seen: MaskSummary,
        bias_grad: bool = False,
    ) -> MaskedRows:
        """Set up the work on the rows of `places.rank`.

        seen: what `summarize_mask` found. bias_grad: the gradient of the bias is
        wanted, which plain math alone has.
        """
        spec, bias = inputs.spec, inputs.bias
        q_segment_ids, kv_segment_ids = inputs.q_segment_ids, inputs.kv_segment_ids
        form = _Form.of(q, v, inputs, bias_grad)
        blocks = mask_blocks(q, v, inputs, places, seen, bias_grad)
        if blocks.has_holes and q_segment_ids is not None:
            q_segment_ids = q_segment_ids[:, places.positions(q.device)]
        else:
            q_segment_ids = kv_segment_ids = None
        limits, ids = (seen.lower, seen.upper), (q_segment_ids, kv_segment_ids)
        added = own_bias(inputs.added, places.own, places.lengths)
        mask = RowMask(*limits, *ids, added, seen.raised)
        dropout = score_mod = None
        at = places.positions(q.device)
        if inputs.seeds is not None:
            dropout = Dropout(spec.dropout_p, inputs.seeds, at)
        if spec.score_mod and bias is not None:
            heads = spec.first_head, spec.last_head
            score_mod = ScoreMod(spec.score_mod, bias, at, *heads)
        vectors = None
        if form.vectors and blocks.ordered and not blocks.has_holes:
            functions = inputs.inlined(bias_grad)
            changes = RowModifiers.of(
                mask, spec.softcap, dropout, score_mod, functions or ""
            )
            vectors = VectorSteps(*limits, places.keys, spec.scale, changes)
        how = (spec.scale, form.kernel, vectors, spec.softcap, dropout, score_mod)
        return cls(mask, blocks, places.keys, *how)

    def forward(
        self, running: RunningAttention, k: Tensor, v: Tensor, source: int
    ) -> None:
        """Add what the rows of `running` find in the keys of a source."""
        q = self.mask.without_lost(running.q)
        if self.vectors is not None:
            if self.blocks.sees(source):
                self.vectors.forward(running, q, k, v, source)
            return
        dtype = mask_dtype(running.q, self.kernel)
        for part in self.blocks.parts(source):
            operands = (rows_of(q, part), keys_of(k, part), keys_of(v, part))
            mask = self.mask.of_part(part, dtype)
            found = block_attention(
                *(*operands, part.triangular, self.scale, self.kernel),
                *(mask, self.softcap, *self.changes(part, q.dtype)),
            )
            sides = (part.row, part.rows, part.key, part.keys)
            block = Block(*sides, part.triangular)
            running.merge(block, *found)

    def changes(
        self, part: MaskPart, dtype: torch.dtype
    ) -> tuple[Tensor | None, ScorePart | None]:
        """Return factors of dropout, in the accumulation dtype, and the score_mod."""
        factors = score_mod = None
        if self.dropout is not None:
            factors = self.dropout.factors(part, accumulation_dtype(dtype))
        if self.score_mod is not None:
            score_mod = self.score_mod.of_part(part)
        return factors, score_mod
