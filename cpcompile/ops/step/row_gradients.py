"""Gradients of some rows on one chunk of keys: the backward of RowWork.

Note [Gradients of lost rows]
In rows whose scores a bias loses, Note [Rows of low numbers], q counts as 0 in the
weights and as what it is in the gradients. No kernel knows that. So they get 0 for the
gradient of such a row, which then adds nothing, and it is computed by matrix products;
there are as many such rows as hidden tokens, mostly padding on the left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cpcompile.geometry.blocks import Block
from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.step.aten_flash import flash_backward
from cpcompile.ops.step.block_attention import (
    above_diagonal,
    keys_of,
    row_dots,
    rows_of,
    without_column,
)
from cpcompile.ops.step.math_attention import accumulation_dtype, finite, math_backward
from cpcompile.ops.step.position_bias import add_bias_gradient, zero_bias_gradient
from cpcompile.ops.step.row_mask import MASK_ELEMENTS
from cpcompile.ops.step.row_work import RowWork


@dataclass(frozen=True)
class SavedRows:
    """What a backward is given of the rows: [B, H, R, ...] each.

    grad, out: of all keys, as with_column gives them. lse: of all keys. delta:
    row_dots, instead of out.
    """

    grad: Tensor
    q: Tensor
    lse: Tensor
    out: Tensor | None = None
    delta: Tensor | None = None

    def dots(self, grad: Tensor) -> Tensor:
        """Return delta for this gradient of out."""
        if self.delta is not None:
            return self.delta
        assert self.out is not None, "either out or delta is given"
        return row_dots(grad, self.out)


class RowGradients:
    """The gradients of some rows, to which `of_chunk` adds those of one chunk of keys.

    dq: [B, H, R, D] so far, in the accumulation dtype. dbias: like the bias, and its
    broadcast dimensions are summed; without elements unless asked for. For a bias of
    positions it is in the accumulation dtype.
    """

    def __init__(
        self,
        work: RowWork,
        saved: SavedRows,
        dq: Tensor | None = None,
        bias_grad: bool = False,
    ) -> None:
        self.work, mask = work, work.mask
        grad, q, self.lse = saved.grad, saved.q, saved.lse
        self.lost_rows: list[tuple[int, int]] = []
        if mask is not None:
            lost, self.lse = mask.lost(q.dtype), finite(saved.lse)
            if lost is not None:
                self.lost_rows = _runs(lost.flatten(0, 1).any(0))
            if lost is not None and self.lost_rows:
                self.lost_grad = grad.masked_fill(~lost, 0)
                self.lost_delta = saved.dots(self.lost_grad)
                self.own_q = q
                grad = grad.masked_fill(lost, 0)
            q = mask.without_lost(q)
        self.grad, self.q, self.out = grad, q, saved.out
        by_flash = work.kernel is StepKernel.FLASH
        self.delta = None if by_flash else saved.dots(grad)
        self.dq = q.new_zeros(q.shape, dtype=accumulation_dtype(q.dtype))
        if dq is not None:
            self.dq.copy_(dq)  # a clone would keep the strides of dq
        self.bias = work.score_mod or (None if mask is None else mask.bias)
        self.dbias = zero_bias_gradient(q, self.bias, bias_grad)

    def of_chunk(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return dk and dv of the chunk, and add to the other gradients.

        They are in the accumulation dtype.
        """
        dk, dv = self._by_kernels(k, v)
        for block in self._lost_blocks(k):
            part = self._of_lost(block, keys_of(k, block), keys_of(v, block))
            self._add(block, part, dk, dv)
        return dk, dv

    def _by_kernels(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        templates = self.work.templates
        if templates is not None:
            assert self.delta is not None, "the step kernels read delta"
            grad = without_column(self.grad, v)
            saved = (grad, self.q, self.lse, self.delta)
            dk, dv = templates.gradients(True, saved, k, v)
            (self.dq,) = templates.gradients(False, saved, k, v, [self.dq])
            if self.dbias.numel():
                templates.add_bias_gradient(self.dbias, saved, k, v)
            return dk, dv
        dtype = accumulation_dtype(k.dtype)
        dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (k, v))
        for block in self.work.blocks:
            part = self._of_block(block, keys_of(k, block), keys_of(v, block))
            self._add(block, part, dk, dv)
        return dk, dv

    def _add(
        self, block: Block, part: tuple[Tensor, Tensor, Tensor], dk: Tensor, dv: Tensor
    ) -> None:
        """Add what a block gives to dq, dk and dv."""
        rows_of(self.dq, block).add_(part[0])
        keys_of(dk, block).add_(part[1])
        keys_of(dv, block).add_(part[2])

    def _of_block(
        self, block: Block, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        work = self.work
        mask = work.mask_of(block, self.q)
        grad, q, lse = (rows_of(x, block) for x in (self.grad, self.q, self.lse))
        if self.delta is None:
            assert self.out is not None, "flash attention reads out"
            operands = (grad, q, k, v, rows_of(self.out, block), lse)
            return flash_backward(*operands, block.triangular, work.scale, mask)
        if block.triangular:
            mask = above_diagonal(q, k)
        grad, delta = without_column(grad, v), rows_of(self.delta, block)
        factors, score_mod = work.modifiers(block, q.dtype)
        dq, dk, dv, ds = math_backward(
            grad,
            q,
            k,
            v,
            lse,
            delta,
            mask,
            work.scale,
            work.softcap,
            factors,
            score_mod,
        )
        add_bias_gradient(self.dbias, self.bias, block, ds)
        return dq, dk, dv

    def _lost_blocks(self, k: Tensor) -> Iterator[Block]:
        """Yield blocks of lost rows and the chunk's keys, few enough at a time."""
        if not self.lost_rows:
            return
        for span in self.work.keys:
            scores = k.shape[0] * self.q.shape[1] * span.count  # of a row
            most = max(MASK_ELEMENTS // max(scores, 1), 1)
            for first, end in self.lost_rows:
                for row in range(first, end, most):
                    sides = (row, min(most, end - row), span.place, span.count)
                    yield Block(*sides, position=span.position, masked=True)

    def _of_lost(
        self, block: Block, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        work, mask = self.work, self.work.mask
        assert mask is not None, "a bias loses the scores of rows"
        grad, q, delta, lse = (
            rows_of(x, block)
            for x in (self.lost_grad, self.own_q, self.lost_delta, self.lse)
        )
        factors, score_mod = work.modifiers(block, q.dtype)
        dq, dk, dv, ds = math_backward(
            without_column(grad, v),
            q,
            k,
            v,
            lse,
            delta,
            mask.of_block(block, accumulation_dtype(q.dtype)),
            work.scale,
            work.softcap,
            factors,
            score_mod,
            mask.replaced(block),
        )
        add_bias_gradient(self.dbias, self.bias, block, ds)
        return dq, dk, dv


def _runs(rows: Tensor) -> list[tuple[int, int]]:
    """Find where runs of True begin and end, in bools [R, 1]."""
    edges = torch.nn.functional.pad(rows.flatten().to(torch.int8), (1, 1)).diff()
    begins, ends = (edges == n for n in (1, -1))
    pairs = zip(begins.nonzero().tolist(), ends.nonzero().tolist(), strict=True)
    return [(begin, end) for (begin,), (end,) in pairs]
