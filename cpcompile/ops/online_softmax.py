"""Accumulates attention over blocks of keys in float32, whatever the model's dtype.

Note [Merging two softmaxes]
Two partial results over disjoint keys, (out_1, lse_1) and (out_2, lse_2), merge to

    lse = log(exp(lse_1) + exp(lse_2))
    out = out_1 + (out_2 - out_1) * sigmoid(lse_2 - lse_1)

which needs no maximum and overflows nowhere. A part without keys has lse = -inf; two
of them would give -inf - (-inf) = NaN, so the weight of an empty part is set to 0.
Source: the blockwise softmax of Milakov and Gimelshein (arXiv 1805.02867), with the
log-sum-exp form of flash attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpcompile.layout import Block
from cpcompile.ops.block_attention import (
    accumulation_dtype,
    block_attention,
    block_attention_backward,
    take_keys,
    take_rows,
)


def merge_weight(lse: Tensor, lse_new: Tensor) -> Tensor:
    """Weight of the new part in the merge, 0 where it is empty. Any equal shapes."""
    return torch.where(lse_new == float("-inf"), 0.0, torch.sigmoid(lse_new - lse))


class RunningAttention:
    """The running (out, lse) of this rank's query rows; see Note [Merging ...].

    out is [B, H, R, E], lse is [B, H, R], both in the accumulation dtype. Rows that
    never meet a key end as out 0 and lse -inf.
    """

    def __init__(self, q_BHRD: Tensor, value_dim: int, scale: float) -> None:
        self.q = q_BHRD
        self.scale = scale
        self.value_dim = value_dim
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def add(self, k_BGKD: Tensor, v_BGKE: Tensor, blocks: tuple[Block, ...]) -> None:
        """Attend to one chunk of keys; `blocks` says which rows see what of it."""
        for block in blocks:
            out, lse = block_attention(
                take_rows(self.q, block),
                take_keys(k_BGKD, block),
                take_keys(v_BGKE, block),
                block.triangular,
                self.scale,
            )
            self._merge(block, out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """out in the dtype of q and lse, both contiguous."""
        out, lse = self._state()
        return out.to(self.q.dtype).contiguous(), lse.contiguous()

    def _state(self) -> tuple[Tensor, Tensor]:
        if self.out is None or self.lse is None:
            B, H, R, _ = self.q.shape
            dtype = accumulation_dtype(self.q.dtype)
            self.out = self.q.new_zeros((B, H, R, self.value_dim), dtype=dtype)
            self.lse = self.q.new_full((B, H, R), float("-inf"), dtype=dtype)
        return self.out, self.lse

    def _merge(self, block: Block, out_new: Tensor, lse_new: Tensor) -> None:
        dtype = accumulation_dtype(self.q.dtype)
        if self.out is None and block.rows == self.q.shape[2]:
            self.out, self.lse = out_new.to(dtype), lse_new
            return
        out, lse = (take_rows(x, block) for x in self._state())
        weight = merge_weight(lse, lse_new)
        out.lerp_(out_new.to(dtype), weight.unsqueeze(-1))
        torch.logaddexp(lse, lse_new, out=lse)


class RunningGradients:
    """Sums gradients of blocks in the accumulation dtype, given final out and lse."""

    def __init__(
        self,
        grad_BHRE: Tensor,
        q_BHRD: Tensor,
        out_BHRE: Tensor,
        lse_BHR: Tensor,
        scale: float,
    ) -> None:
        self.grad, self.q, self.out, self.lse = grad_BHRE, q_BHRD, out_BHRE, lse_BHR
        self.scale = scale
        self.dq = torch.zeros(
            q_BHRD.shape, dtype=accumulation_dtype(q_BHRD.dtype), device=q_BHRD.device
        )

    def add(
        self,
        k_BGKD: Tensor,
        v_BGKE: Tensor,
        blocks: tuple[Block, ...],
    ) -> list[tuple[Block, Tensor, Tensor]]:
        """Add to dq; returns (block, dk, dv) per block, for the owner to add."""
        parts = []
        for block in blocks:
            dq, dk, dv = block_attention_backward(
                take_rows(self.grad, block),
                take_rows(self.q, block),
                take_keys(k_BGKD, block),
                take_keys(v_BGKE, block),
                take_rows(self.out, block),
                take_rows(self.lse, block),
                block.triangular,
                self.scale,
            )
            take_rows(self.dq, block).add_(dq)
            parts.append((block, dk, dv))
        return parts
