"""Merge attention over disjoint keys in the accumulation dtype.

Note [Merging two softmaxes]
Two partial results over disjoint keys, (out_1, lse_1) and (out_2, lse_2), merge to

    lse = log(exp(lse_1) + exp(lse_2))
    out = out_1 * sigmoid(lse_1 - lse_2) + out_2 * sigmoid(lse_2 - lse_1)

which needs no maximum and overflows nowhere. A part without keys has lse = -inf; two
of them would give -inf - (-inf) = NaN, so the weight of an empty part is set to 0.
Infinite values stay infinite, as in one softmax: an interpolation, out_1 +
(out_2 - out_1) * weight, would make NaN of them, and 1 - weight is 0 too early.
Source: the blockwise softmax of Milakov and Gimelshein (arXiv 1805.02867), with the
log-sum-exp form of flash attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpcompile.geometry.blocks import Block
from cpcompile.ops.step.block_attention import rows_of
from cpcompile.ops.step.math_attention import accumulation_dtype


def merge_weight(lse: Tensor, lse_new: Tensor) -> Tensor:
    """Return the weight of the new part in the merge, 0 where it is empty.

    Any equal shapes. With the arguments exchanged it is the weight of the old part.
    """
    return torch.where(lse_new == float("-inf"), 0.0, torch.sigmoid(lse_new - lse))


def _weights(lse: Tensor, lse_new: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of the old and the new out, [.., 1]."""
    old, new = merge_weight(lse_new, lse), merge_weight(lse, lse_new)
    return old.unsqueeze(-1), new.unsqueeze(-1)


class RunningAttention:
    """The running (out, lse) of some query rows; see Note [Merging two softmaxes].

    out is [B, H, R, E], lse is [B, H, R], both in the accumulation dtype; what is given
    to begin with is never written to. Rows that never meet a key end as 0 and -inf.
    """

    def __init__(
        self,
        q_BHRD: Tensor,
        value_dim: int,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> None:
        self.q = q_BHRD
        self.value_dim = value_dim
        self.out, self.lse = out, lse
        self.owned = False
        # Runs of rows that have met no key yet.
        self._unseen = [(0, q_BHRD.shape[2])] if out is None else []

    def merge(self, block: Block, out_new: Tensor, lse_new: Tensor) -> None:
        """Add what the rows of `block` found in it."""
        dtype = accumulation_dtype(self.q.dtype)
        out_new = out_new.to(dtype)
        every_row, first = block.rows == self.q.shape[2], self._is_first(block)
        if every_row and (self.out is None or self.lse is None):
            self.out, self.lse, self.owned = out_new, lse_new, True
            return
        if every_row and not self.owned:
            assert self.out is not None and self.lse is not None
            old, new = _weights(self.lse, lse_new)
            self.out = (self.out * old).addcmul_(out_new, new)
            self.lse = torch.logaddexp(self.lse, lse_new)
            self.owned = True
            return
        out, lse = (rows_of(x, block) for x in self._own())
        if first:
            out.copy_(out_new)
            lse.copy_(lse_new)
            return
        old, new = _weights(lse, lse_new)
        out.mul_(old).addcmul_(out_new, new)
        torch.logaddexp(lse, lse_new, out=lse)

    def replace(self, out: Tensor, lse: Tensor) -> None:
        """Take the out and lse of a step; after the last one out may be as q is."""
        self.out, self.lse, self.owned = out, lse, True
        self._unseen = []

    def _is_first(self, block: Block) -> bool:
        """Tell whether none of these rows has met a key; from now on they have.

        Rows between those of a step count as if they had: they hold 0 and -inf.
        """
        start, stop = block.row, block.row + (block.rows - 1) * block.step + 1
        inside = any(a <= start and stop <= b for a, b in self._unseen)
        self._unseen = [
            (a, b)
            for low, high in self._unseen
            for a, b in ((low, min(high, start)), (max(low, stop), high))
            if a < b
        ]
        return inside

    def result(self, final: bool) -> tuple[Tensor, Tensor]:
        """Return new, contiguous out (in the dtype of q if `final`) and lse."""
        out, lse = self._own()
        if final:
            out = out.to(self.q.dtype)
        return out.contiguous(), lse.contiguous()

    def _own(self) -> tuple[Tensor, Tensor]:
        """Return out and lse that may be written to and returned."""
        if self.out is None or self.lse is None:
            B, H, R, _ = self.q.shape
            dtype = accumulation_dtype(self.q.dtype)
            self.out = self.q.new_zeros((B, H, R, self.value_dim), dtype=dtype)
            self.lse = self.q.new_full((B, H, R), float("-inf"), dtype=dtype)
        elif not self.owned:
            self.out, self.lse = self.out.clone(), self.lse.clone()
        self.owned = True
        return self.out, self.lse
