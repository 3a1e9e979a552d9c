"""The rows of one rank under a mask: its summary, and the work on each chunk of keys.

Blocks are those of Note [Blocks of a mask] in mask_tiles.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cpcompile.geometry.key_ranges import KeyRanges
from cpcompile.geometry.mask_blocks import Cut, MaskBlocks
from cpcompile.geometry.mask_cache import cached_blocks
from cpcompile.geometry.mask_tiles import Tile, TokenSpan
from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.attention_spec import AttentionInputs
from cpcompile.ops.step.dropout import Dropout
from cpcompile.ops.step.position_bias import own_bias
from cpcompile.ops.step.row_changes import RowModifiers
from cpcompile.ops.step.row_mask import MASK_ELEMENTS, RowMask
from cpcompile.ops.step.row_work import RowWork
from cpcompile.ops.step.score_mod import ScoreMod
from cpcompile.ops.step.template_steps import TemplateSteps


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
    """The summary of a mask for one rank; Note [One summary of the mask].

    lower, upper: int64 [B or 1, rows], the range of keys of each row.
    table: which runs of keys the rows of all ranks see, on the host, as
        MaskBlocks.of_table reads it; empty for a mask with a name in mask_cache.py.
    row_shift: [B or 1, H or 1, rows, 1], see Note [Rows of low numbers]; or empty.
    """

    lower: Tensor
    upper: Tensor
    table: Tensor
    row_shift: Tensor


@dataclass(frozen=True)
class MaskedRows:
    """The rows of this rank under a mask, or with changed scores.

    q: [B, H, R, D], of these rows.
    kernel: that of the call, see masked_step_kernel. TEMPLATE computes chunks where
        key ranges are ordered and say all, else plain math does it by blocks.
    bias_grad: whether a backward wants the gradient of the bias, which plain math
        alone has by blocks.
    """

    q: Tensor
    inputs: AttentionInputs
    spans: TokenSpans
    kernel: StepKernel
    bias_grad: bool = False

    @property
    def cut(self) -> Cut:
        """How the scores are cut into blocks."""
        spans, is_math = self.spans, self._block_kernel is StepKernel.MATH
        cut_all = self.inputs.bias is not None or is_math
        return Cut(spans.rows, spans.keys, spans.rank, self._tile, cut_all)

    @property
    def _tile(self) -> Tile:
        copies = max(1 if x is None else x.shape[0] for x in self.inputs.masks)
        if self.inputs.bias is not None:
            copies *= self.inputs.bias.shape[1]
        if self._block_kernel is StepKernel.MATH:
            copies = self.q.shape[0] * self.q.shape[1]
        return Tile.of(copies, MASK_ELEMENTS)

    @property
    def _block_kernel(self) -> StepKernel:
        if self.bias_grad or self.kernel is not StepKernel.FLASH:
            return StepKernel.MATH
        return self.kernel

    def summarize(self) -> MaskSummary:
        """Summarize the mask once, for the chunks of all sources."""
        inputs, spans, device = self.inputs, self.spans, self.q.device
        ranges = self._key_ranges()
        table = torch.zeros(0, dtype=torch.int64)
        if not inputs.spec.mask_key:
            table = self.cut.summarize(ranges)
        own = spans.positions(device)
        lower, upper = ranges.lower[:, own], ranges.upper[:, own]
        q_segment_ids = inputs.q_segment_ids
        if q_segment_ids is not None:
            q_segment_ids = q_segment_ids[:, own]
        added = own_bias(inputs.added, spans.own, spans.lengths)
        mask = RowMask(lower, upper, q_segment_ids, inputs.kv_segment_ids, added)
        row_shift = mask.row_shift
        no_shift = self.q.new_zeros(0)
        return MaskSummary(
            lower, upper, table, no_shift if row_shift is None else row_shift
        )

    def blocks(self, summary: MaskSummary) -> MaskBlocks:
        """Return the blocks that this rank computes."""
        name, cut = self.inputs.spec.mask_key, self.cut
        if not name:
            return MaskBlocks.of_table(summary.table, cut)
        blocks = cached_blocks(name, cut)
        if blocks is None:  # it is not cached any more
            blocks = MaskBlocks.of(self._key_ranges(), cut)
        return blocks

    def work(self, summary: MaskSummary, source: int, key_count: int) -> RowWork:
        """Set up the work on the keys of a source, padded to `key_count`."""
        inputs, spec, spans = self.inputs, self.inputs.spec, self.spans
        blocks, bias = self.blocks(summary), inputs.bias
        rows_R = spans.positions(self.q.device)
        q_segment_ids = kv_segment_ids = None
        if blocks.has_holes and inputs.q_segment_ids is not None:
            q_segment_ids = inputs.q_segment_ids[:, rows_R]
            kv_segment_ids = inputs.kv_segment_ids
        mask = RowMask(
            summary.lower,
            summary.upper,
            q_segment_ids,
            kv_segment_ids,
            own_bias(inputs.added, spans.own, spans.lengths),
            summary.row_shift,
        )
        dropout = score_mod = None
        if inputs.seeds is not None:
            dropout = Dropout(spec.dropout_p, inputs.seeds, rows_R)
        if spec.score_mod and bias is not None:
            heads = spec.first_head, spec.last_head
            score_mod = ScoreMod(spec.score_mod, bias, rows_R, *heads)
        keys, templates, own_blocks = spans.keys[source], None, []
        by_template = self.kernel is StepKernel.TEMPLATE
        if not (by_template and blocks.ordered and not blocks.has_holes):
            own_blocks = blocks.of_source(source)
        elif blocks.sees(source):
            functions = inputs.inlined(self.bias_grad) or ""
            changes = (spec.softcap, dropout, score_mod, functions)
            modifiers = RowModifiers.of(mask, *changes)
            chunk = (self.q, key_count, keys)
            templates = TemplateSteps.of_mask(mask, modifiers, *chunk, spec.scale)
        return RowWork(
            self._block_kernel,
            spec.scale,
            own_blocks,
            templates,
            mask,
            keys,
            spec.softcap,
            dropout,
            score_mod,
        )

    def _key_ranges(self) -> KeyRanges:
        _, limits, q_ids, kv_ids = self.inputs.masks
        lengths = self.spans.lengths
        return KeyRanges.of(limits, q_ids, kv_ids, *lengths, self.q.device)
