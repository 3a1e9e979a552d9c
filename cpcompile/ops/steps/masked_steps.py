"""Masked attention of this rank's rows on the keys of one source after another.

The operators differ in how keys come here; what is computed on them is the same, and is
here. Parts are those of Note [Parts of a mask].

Note [Rows of low numbers]
Models hide keys by -1e9. A row that has nothing else has a log-sum-exp of
-1e9 + log(n), which float32 rounds to -1e9: parts could not be merged by their numbers
of keys. So such a row is raised by its highest number, which changes no softmax. Where
adding the bias loses the scores, torch gives the mean of the values that have it: there
q counts as 0, and gets no gradient. Rows of -inf see nothing, and give 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from cpcompile.geometry.blocks import Block
from cpcompile.geometry.key_ranges import KeyRanges
from cpcompile.geometry.known_masks import known_blocks
from cpcompile.geometry.mask_blocks import MaskBlocks, Part, Span, Tile
from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.steps.block_attention import row_dots
from cpcompile.ops.steps.masked_block import (
    HIDDEN,
    mask_dtype,
    masked_block,
    masked_block_backward,
    masked_kernel,
    masked_math_backward,
)
from cpcompile.ops.steps.masked_vectors import VectorSteps
from cpcompile.ops.steps.math_attention import accumulation_dtype, finite
from cpcompile.ops.steps.online_softmax import RunningAttention

MASK_ELEMENTS = 1 << 24  # at most of a mask, or of scores that are held, at a time
_LOW = -1024.0  # below it rows are raised; Note [Rows of low numbers]
_LOST = 16.0  # half a unit in the last place is as large as scores are, or larger


class MaskOperands(NamedTuple):
    """The fields of Mask as operators take them; bias has this rank's rows only.

    known: the name of key ranges and segment ids that `remember` keeps, or "".
    """

    bias: Tensor | None
    key_ranges: Tensor | None
    q_segment_ids: Tensor | None
    kv_segment_ids: Tensor | None
    known: str = ""

    @property
    def are_given(self) -> bool:
        """Whether there is any."""
        return any(x is not None for x in self[:4])


MASK_FIELDS = MaskOperands._fields[:4]  # the tensors


@dataclass(frozen=True)
class RowMask:
    """The mask of this rank's rows: [B or 1, rows] each, and bias and the keys' ids.

    ids are None where the ranges say all that they say.
    """

    ranges: KeyRanges
    q_segment_ids: Tensor | None
    kv_segment_ids: Tensor | None
    bias: Tensor | None

    def of_part(self, part: Part, dtype: torch.dtype) -> Tensor | None:
        """The additive mask of a part, as masked_block takes it."""
        visible = self._visible(part) if part.masked else None
        if self.bias is None:
            if visible is None:
                return None
            mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            return mask.masked_fill_(~visible, HIDDEN)
        bias = _rows(self.bias, part).narrow(3, part.position, part.keys)
        if bias.dtype == torch.bool:
            visible = bias if visible is None else bias & visible
            mask = torch.zeros(visible.shape, dtype=dtype, device=bias.device)
            return mask.masked_fill_(~visible, HIDDEN)
        hidden = bias == -torch.inf
        if visible is not None:
            hidden = hidden | ~visible
        if self.highest is not None:
            bias = bias - _rows(self.highest, part)
        return bias.to(dtype).masked_fill(hidden, HIDDEN)

    @cached_property
    def highest(self) -> Tensor | None:
        """[B or 1, H or 1, rows, 1]: the highest that a row sees; 0 if not low."""
        bias = self.bias
        if bias is None or bias.dtype == torch.bool or not bias.numel():
            return None
        *copies, rows, keys = bias.shape
        most = max(MASK_ELEMENTS // (copies[0] * copies[1] * keys), 1)
        seen = []
        for row in range(0, rows, most):
            part = Part(row, min(most, rows - row), 0, keys, 0, True)
            hidden = ~self._visible(part)
            numbers = _rows(bias.detach(), part).masked_fill(hidden, -torch.inf)
            seen.append(numbers.amax(-1, keepdim=True))
        found = torch.cat(seen, 2)
        low = (found < _LOW) & (found > -torch.inf)
        return found.masked_fill(~low, 0)

    def without_lost(self, q: Tensor) -> Tensor:
        """q, or its gradient, with 0 in the rows whose scores the bias loses."""
        if self.highest is None:
            return q
        dtype = accumulation_dtype(q.dtype)
        lost = self.highest.to(dtype) * -torch.finfo(dtype).eps / 2 >= _LOST
        return q.masked_fill(lost, 0)

    def _visible(self, part: Part) -> Tensor:
        """bool [B or 1, 1, rows, keys]."""
        rows = slice(part.row, part.row + part.rows)
        keys = slice(part.position, part.position + part.keys)
        lower, upper = (
            x[:, rows].unsqueeze(-1) for x in (self.ranges.lower, self.ranges.upper)
        )
        position = torch.arange(keys.start, keys.stop, device=lower.device)
        visible = (position >= lower) & (position < upper)
        if self.q_segment_ids is not None and self.kv_segment_ids is not None:
            ids = self.q_segment_ids[:, rows].unsqueeze(-1)
            visible = visible & (ids == self.kv_segment_ids[:, keys].unsqueeze(1))
        return visible.unsqueeze(1)


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

    @classmethod
    def of(
        cls,
        q: Tensor,
        v: Tensor,
        masks: MaskOperands,
        lengths: tuple[int, int],
        rows: Sequence[tuple[Span, ...]],
        keys: Sequence[tuple[Span, ...]],
        rank: int,
        scale: float,
        bias_grad: bool = False,
    ) -> MaskedRows:
        """For the rows of `rank`; rows and keys are those of MaskBlocks.of.

        bias_grad: the gradient of the bias is wanted, which plain math alone has.
        """
        bias, key_ranges, q_segment_ids, kv_segment_ids, known = masks
        ranges = KeyRanges.of(
            key_ranges, q_segment_ids, kv_segment_ids, *lengths, q.device
        )
        kernel = masked_kernel(q, v, bias)
        copies = ranges.lower.shape[0]
        if bias is not None:
            copies = max(copies, bias.shape[0]) * bias.shape[1]
        template = kernel is StepKernel.TEMPLATE
        if bias_grad or kernel is not StepKernel.FLASH:
            kernel, copies = StepKernel.MATH, q.shape[0] * q.shape[1]
        tile = Tile.of(copies, MASK_ELEMENTS)
        cut_all = bias is not None or kernel is StepKernel.MATH
        cut = (tuple(rows), tuple(keys), rank, tile, cut_all)
        blocks = known_blocks(known, *cut) or MaskBlocks.of(ranges, *cut)
        parts = [torch.arange(x.position, x.stop, device=q.device) for x in rows[rank]]
        own = torch.cat(parts) if parts else torch.arange(0, device=q.device)
        if blocks.has_holes and q_segment_ids is not None:
            mask = RowMask(
                ranges.rows(own), q_segment_ids[:, own], kv_segment_ids, bias
            )
        else:
            mask = RowMask(ranges.rows(own), None, None, bias)
        vectors = None
        if template and blocks.ordered and not blocks.has_holes:
            vectors = VectorSteps(mask.ranges, keys, scale)
        return cls(mask, blocks, scale, kernel, vectors)

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
            operands = (_rows(q, part), _keys(k, part), _keys(v, part))
            mask = self.mask.of_part(part, dtype)
            found = masked_block(*operands, mask, self.scale, self.kernel)
            block = Block(part.row, part.rows, part.key, part.keys, False)
            running.merge(block, *found)


class MaskedGradients:
    """The gradients of this rank's rows, which grow with every source.

    dq: [B, H, R, D] in the accumulation dtype. dbias: like the bias, and its broadcast
    dimensions are summed; without elements unless asked for.
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
        # Every pair is computed once, so that nothing is summed here but broadcasts.
        self.dbias = new_bias_gradient(q, rows.mask.bias, bias_grad).zero_()

    def of_source(self, k: Tensor, v: Tensor, source: int) -> list[Tensor]:
        """dk and dv of the keys of a source, in the accumulation dtype."""
        vectors = self.rows.vectors
        if vectors is not None and self.rows.blocks.sees(source):
            assert self.delta is not None, "the step kernels read delta"
            saved = (self.grad, self.q, self.lse, self.delta)
            self.dq, dk, dv = vectors.backward(saved, self.dq, k, v, source)
            return [dk, dv]
        dtype = accumulation_dtype(k.dtype)
        dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (k, v))
        for part in self.rows.blocks.parts(source):
            found = self._of_part(part, _keys(k, part), _keys(v, part))
            _rows(self.dq, part).add_(found[0])
            _keys(dk, part).add_(found[1])
            _keys(dv, part).add_(found[2])
        return [dk, dv]

    def result(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a backward returns, given dk and dv of this rank: dq, dk, dv, dbias."""
        dq = self.rows.mask.without_lost(self.dq)
        return dq.to(self.q.dtype), dk, dv, self.dbias

    def _of_part(
        self, part: Part, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        call = self.rows
        mask = call.mask.of_part(part, mask_dtype(self.q, call.kernel))
        grad, q, out = (_rows(x, part) for x in (self.grad, self.q, self.out))
        lse = _rows(self.lse, part)
        if self.delta is None:
            operands = (grad, q, k, v, out, lse, mask)
            return masked_block_backward(*operands, call.scale, call.kernel)
        delta = _rows(self.delta, part)
        dq, dk, dv, ds = masked_math_backward(
            grad, q, k, v, delta, lse, mask, call.scale
        )
        if self.dbias.numel():
            place = _rows(self.dbias, part).narrow(3, part.position, part.keys)
            place.copy_(ds.sum_to_size(place.shape))
        return dq, dk, dv


def new_bias_gradient(q: Tensor, bias: Tensor | None, wanted: bool) -> Tensor:
    """A tensor for dbias, without elements where none is wanted."""
    if bias is None or not wanted:
        return q.new_empty((0, 0, 0, 0))
    return bias.new_empty(bias.shape)


def _rows(x: Tensor, part: Part) -> Tensor:
    """The rows of `part`, a view: x is [B, H, rows, ...]."""
    return x.narrow(2, part.row, part.rows)


def _keys(x: Tensor, part: Part) -> Tensor:
    """The keys of `part`, a view: x is [B, G, keys, ...]."""
    return x.narrow(2, part.key, part.keys)
