"""The mask of one rank's rows, and the additive mask of any block of it.

Note [Rows of low numbers]
Models hide keys by -1e9. A row that has nothing else has a log-sum-exp of
-1e9 + log(n), which float32 rounds to -1e9: parts could not be merged by their numbers
of keys. So such a row is shifted by its highest number, which changes no softmax. Where
adding the bias loses the scores, torch gives the mean of the values that have it: there
q counts as 0. Autograd does not know that they are lost: q and k get the gradient of
a plain sum. Rows of -inf see nothing, and give 0.

Where a model fills in a low number in place of a score, q and k get none. Such a number
is FILLED, which counts as the lowest that is added to others: the mean is of both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from cpcompile.geometry.blocks import Block
from cpcompile.ops.step.block_attention import rows_of
from cpcompile.ops.step.math_attention import HIDDEN, accumulation_dtype
from cpcompile.ops.step.position_bias import PositionBias

MASK_ELEMENTS = 1 << 24  # at most of a mask, or of scores that are held, at a time
_LOW = -1024.0  # below it rows are shifted; Note [Rows of low numbers]
_LOST = 16.0  # half a unit in the last place is as large as scores are, or larger


def filled_number(dtype: torch.dtype) -> float:
    """Return FILLED, which gives -inf with the lowest number added but is not that.

    float16 has no number in which scores are lost; there it is the lowest.
    """
    numbers = torch.finfo(dtype)
    if dtype == torch.float16:
        return numbers.min
    return -math.ldexp(0.25, math.frexp(numbers.max)[1])  # of float32 -2^126


@dataclass(frozen=True)
class RowMask:
    """The mask of this rank's rows: [B or 1, rows] each, and bias and the keys' ids.

    lower, upper: the key range of each row. ids are None where the ranges say all that
    they say. known_shift: `row_shift`, if it is known.
    """

    lower: Tensor
    upper: Tensor
    q_segment_ids: Tensor | None = None
    kv_segment_ids: Tensor | None = None
    bias: Tensor | PositionBias | None = None
    known_shift: Tensor | None = None

    def of_block(self, block: Block, dtype: torch.dtype) -> Tensor | None:
        """Return the additive mask of a block, as block_attention takes it."""
        visible = self._visible(block) if block.masked else None
        if self.bias is None:
            if visible is None:
                return None
            mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            return mask.masked_fill_(~visible, HIDDEN)
        bias = self._bias(block)
        if bias.dtype == torch.bool:
            visible = bias if visible is None else bias & visible
            mask = torch.zeros(visible.shape, dtype=dtype, device=bias.device)
            return mask.masked_fill_(~visible, HIDDEN)
        hidden = bias == -torch.inf
        if visible is not None:
            hidden = hidden | ~visible
        if self.row_shift is not None:
            bias = bias - rows_of(self.row_shift, block)
        if self._even is not None:
            bias = bias.masked_fill(rows_of(self._even, block), 0)
        return bias.to(dtype).masked_fill(hidden, HIDDEN)

    @cached_property
    def row_shift(self) -> Tensor | None:
        """Highest number that a row sees, 0 if not low: [B or 1, H or 1, rows, 1]."""
        if self.known_shift is not None:
            return self.known_shift if self.known_shift.numel() else None
        bias = self.bias
        if bias is None or not may_be_shifted(bias):
            return None
        if isinstance(bias, Tensor):
            shape, keys = bias.shape[:3], bias.shape[3]
            runs = [(0, shape[2])]
        else:
            shape = torch.Size((*bias.table.shape[:2], self.lower.shape[1]))
            keys, runs = bias.kv_len, [(x.place, x.count) for x in bias.rows]
            low = (bias.table < _LOW) & (bias.table > -torch.inf)
            if not runs or not bool(low.any()):
                batch = max(shape[0], self.lower.shape[0])
                return bias.table.new_zeros((batch, *shape[1:], 1))
        most = max(MASK_ELEMENTS // (shape[0] * shape[1] * keys), 1)
        highest = []
        for start, count in runs:
            for row in range(start, start + count, most):
                rows = min(most, start + count - row)
                block = Block(row, rows, 0, keys, masked=True)
                numbers = self._bias(block).detach()
                hidden = ~self._visible(block)
                numbers = numbers.masked_fill(hidden, -torch.inf)
                highest.append(numbers.amax(-1, keepdim=True))
        shift = torch.cat(highest, 2)
        low = (shift < _LOW) & (shift > -torch.inf)
        return shift.masked_fill(~low, 0)

    @cached_property
    def _even(self) -> Tensor | None:
        """Rows of numbers that count alike, bool like `row_shift`; None if none is."""
        row_shift = self.row_shift
        if row_shift is None:
            return None
        even = row_shift <= filled_number(row_shift.dtype)
        return even if bool(even.any()) else None

    def replaced(self, block: Block) -> Tensor:
        """Tell where a number replaces the score.

        bool [B or 1, H or 1, rows or 1, keys].
        """
        bias = self._bias(block)
        return bias == filled_number(bias.dtype)

    def lost(self, dtype: torch.dtype) -> Tensor | None:
        """Tell in which rows the bias loses scores of a dtype, like `row_shift`."""
        if self.row_shift is None:
            return None
        dtype = accumulation_dtype(dtype)
        return self.row_shift.to(dtype) * -torch.finfo(dtype).eps / 2 >= _LOST

    def without_lost(self, q: Tensor) -> Tensor:
        """Return q with 0 in the rows whose scores the bias loses."""
        lost = self.lost(q.dtype)
        return q if lost is None else q.masked_fill(lost, 0)

    def _bias(self, block: Block) -> Tensor:
        """Return the bias of a block, [B or 1, H or 1, rows or 1, keys]."""
        if isinstance(self.bias, PositionBias):
            return self.bias.of_block(block)
        assert self.bias is not None, "a block of a bias that is there"
        return rows_of(self.bias, block).narrow(3, block.position, block.keys)

    def _visible(self, block: Block) -> Tensor:
        """Tell which keys rows see: bool [B or 1, 1, rows, keys]."""
        rows = slice(block.row, block.row + block.rows)
        keys = slice(block.position, block.position + block.keys)
        lower, upper = (x[:, rows].unsqueeze(-1) for x in (self.lower, self.upper))
        position = torch.arange(keys.start, keys.stop, device=lower.device)
        visible = (position >= lower) & (position < upper)
        if self.q_segment_ids is not None and self.kv_segment_ids is not None:
            ids = self.q_segment_ids[:, rows].unsqueeze(-1)
            visible = visible & (ids == self.kv_segment_ids[:, keys].unsqueeze(1))
        return visible.unsqueeze(1)


def may_be_shifted(bias: Tensor | PositionBias) -> bool:
    """Tell whether rows of a bias can be low at all; see Note [Rows of low numbers]."""
    x = bias.table if isinstance(bias, PositionBias) else bias
    return x.dtype != torch.bool and x.numel() > 0
