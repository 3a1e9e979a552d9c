"""A bias that the key or the distance decides, made for one block of the scores.

ALiBi's slope * (k - q), or T5's table[bucket(k - q)], are functions of the distance. So
all that is held of them is one number per distance, and a block of rows x keys reads a
window of rows + keys - 1 of these: row i of it begins one entry before row i - 1.

The gradient of a block sums the entries of one distance, which are its diagonals: rows
that are padded by as many entries as there are rows, and read as rows of one entry
less, have the entries of each diagonal below each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cpcompile.geometry.blocks import Block
from cpcompile.geometry.mask_tiles import TokenSpan
from cpcompile.ops.attention_spec import is_of_positions
from cpcompile.ops.step.math_attention import accumulation_dtype
from cpcompile.ops.step.score_mod import ScoreMod


@dataclass(frozen=True)
class PositionBias:
    """A bias of keys or distances, as it is added to the scores of this rank's rows.

    table: [B or 1, H or 1, n]. n = kv_len: entry j is that of key j, for all queries.
        n = q_len + kv_len - 1: entry d + q_len - 1 is that of key - query = d.
    rows: where this rank's rows are, of q_len in all; no block has rows of two spans.
    """

    table: Tensor
    rows: Sequence[TokenSpan]
    q_len: int
    kv_len: int

    def of_block(self, block: Block) -> Tensor:
        """Return the bias of a block, [B or 1, H or 1, rows, keys]."""
        if self.is_by_key:
            keys = self.table.narrow(2, block.position, block.keys).unsqueeze(2)
            return keys.expand(-1, -1, block.rows, -1)
        window = self.table.narrow(2, *self._window(block))
        return window.unfold(2, block.keys, 1).flip(2)

    def add_gradient(self, total: Tensor, block: Block, ds_BHRK: Tensor) -> None:
        """Add to `total`, like the table, what the scores of a block contribute."""
        ds = ds_BHRK.sum_to_size((*self.table.shape[:2], *ds_BHRK.shape[2:]))
        if self.is_by_key:
            total.narrow(2, block.position, block.keys).add_(ds.sum(2))
            return
        skewed = F.pad(ds.flip(2), (0, block.rows)).flatten(2)[..., : -block.rows]
        diagonals = skewed.unflatten(2, (block.rows, -1)).sum(2)
        total.narrow(2, *self._window(block)).add_(diagonals)

    @property
    def is_by_key(self) -> bool:
        """Tell whether the numbers are those of keys, not of distances."""
        return self.table.shape[2] == self.kv_len

    def offsets(self, device: torch.device) -> Tensor:
        """Return, [R], what to add to a key's position for its entry by distance."""
        each = [torch.arange(x.position, x.stop, device=device) for x in self.rows]
        return self.q_len - 1 - torch.cat(each)

    def entries(self, rows: TokenSpan, keys: TokenSpan) -> tuple[int, int]:
        """Return which entries the pairs of two spans read: the first, and how many."""
        if self.is_by_key:
            return keys.position, keys.count
        first = keys.position - (rows.stop - 1) + self.q_len - 1
        return first, rows.count + keys.count - 1

    def _window(self, block: Block) -> tuple[int, int]:
        span = next(x for x in self.rows if x.place <= block.row < x.place + x.count)
        first_row = span.position + block.row - span.place
        rows = TokenSpan(first_row, block.row, block.rows)
        return self.entries(rows, TokenSpan(block.position, block.key, block.keys))


def own_bias(
    bias: Tensor | None, rows: Sequence[TokenSpan], lengths: tuple[int, int]
) -> Tensor | PositionBias | None:
    """Return a bias as these rows read it; lengths: of the queries and of the keys."""
    if bias is None or not is_of_positions(bias):
        return bias
    return PositionBias(bias, rows, *lengths)


def zero_bias_gradient(
    q: Tensor, bias: Tensor | PositionBias | ScoreMod | None, wanted: bool
) -> Tensor:
    """Make zeros to add gradients to; for positions in the accumulation dtype."""
    if bias is None or not wanted:
        return new_bias_gradient(q, None, False)
    if isinstance(bias, Tensor):
        return new_bias_gradient(q, bias, wanted).zero_()
    total = new_bias_gradient(q, bias.table, wanted)
    return torch.zeros_like(total, dtype=accumulation_dtype(q.dtype))


def add_bias_gradient(
    total: Tensor,
    bias: Tensor | PositionBias | ScoreMod | None,
    block: Block,
    ds_BHRK: Tensor,
) -> None:
    """Add what a block contributes, where a gradient is wanted.

    ds_BHRK: the gradient of the scores; with a score_mod, of its table.
    """
    if not total.numel():
        return
    if isinstance(bias, ScoreMod):
        total.add_(ds_BHRK)
        return
    if isinstance(bias, PositionBias):
        bias.add_gradient(total, block, ds_BHRK)
        return
    rows = total.narrow(2, block.row, block.rows)
    place = rows.narrow(3, block.position, block.keys)
    place.add_(ds_BHRK.sum_to_size(place.shape))


def new_bias_gradient(q: Tensor, bias: Tensor | None, wanted: bool) -> Tensor:
    """Make a tensor for dbias, without elements where none is wanted."""
    if bias is None or not wanted:
        return q.new_empty((0, 0, 0, 0))
    return torch.empty_like(bias, memory_format=torch.contiguous_format)
