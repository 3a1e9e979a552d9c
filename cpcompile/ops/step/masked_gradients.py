"""Gradients of masked attention of this rank's rows, on one source after another.

Note [Gradients of lost rows]
In rows whose scores a bias loses, Note [Rows of low numbers], q counts as 0 in the
weights and as what it is in the gradients. No kernel knows that. So they get 0 for the
gradient of such a row, which then adds nothing, and it is computed by matrix products;
there are as many such rows as hidden tokens, mostly padding on the left.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cpcompile.geometry.mask_parts import MaskPart
from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.step.block_attention import (
    block_attention_backward,
    mask_dtype,
    row_dots,
    without_column,
)
from cpcompile.ops.step.masked_steps import MaskedRows
from cpcompile.ops.step.math_attention import (
    accumulation_dtype,
    finite,
    math_backward,
)
from cpcompile.ops.step.position_bias import (
    add_bias_gradient,
    as_bias_gradient,
    zero_bias_gradient,
)
from cpcompile.ops.step.row_mask import MASK_ELEMENTS, keys_of, rows_of


class MaskedGradients:
    """The gradients of this rank's rows, which grow with every source.

    dq: [B, H, R, D] in the accumulation dtype. dbias: like the bias, and its broadcast
    dimensions are summed; without elements unless asked for. For a bias of positions it
    is in the accumulation dtype, until `result`. grad, out: as with_column gives them.
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
        lost = rows.mask.lost(q.dtype)
        self.lost_rows = [] if lost is None else _runs(lost.flatten(0, 1).any(0))
        if lost is not None and self.lost_rows:
            self.lost_grad = grad.masked_fill(~lost, 0)
            self.lost_delta = row_dots(self.lost_grad, out)
            self.own_q = q
            grad = grad.masked_fill(lost, 0)
        self.grad, self.out = grad, out
        self.q = rows.mask.without_lost(q)
        self.lse = finite(lse)
        self.delta = row_dots(grad, out) if rows.kernel is StepKernel.MATH else None
        self.dq = q.new_zeros(q.shape, dtype=accumulation_dtype(q.dtype))
        self.bias = rows.score_mod or rows.mask.bias
        self.dbias = zero_bias_gradient(q, self.bias, bias_grad)

    def of_source(self, k: Tensor, v: Tensor, source: int) -> list[Tensor]:
        """Return dk and dv of the keys of a source, and add to the other gradients.

        They are in the accumulation dtype.
        """
        dk, dv = self._by_kernels(k, v, source)
        for part in self._lost_parts(k, source):
            found = self._of_lost(part, keys_of(k, part), keys_of(v, part))
            rows_of(self.dq, part).add_(found[0])
            keys_of(dk, part).add_(found[1])
            keys_of(dv, part).add_(found[2])
        return [dk, dv]

    def _by_kernels(self, k: Tensor, v: Tensor, source: int) -> tuple[Tensor, Tensor]:
        vectors = self.rows.vectors
        if vectors is not None and self.rows.blocks.sees(source):
            assert self.delta is not None, "the step kernels read delta"
            saved = (without_column(self.grad, v), self.q, self.lse, self.delta)
            self.dq, dk, dv = vectors.backward(saved, self.dq, k, v, source)
            if self.dbias.numel():
                vectors.add_bias_gradient(self.dbias, saved, k, v, source)
            return dk, dv
        dtype = accumulation_dtype(k.dtype)
        dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (k, v))
        for part in self.rows.blocks.parts(source):
            found = self._of_part(part, keys_of(k, part), keys_of(v, part))
            rows_of(self.dq, part).add_(found[0])
            keys_of(dk, part).add_(found[1])
            keys_of(dv, part).add_(found[2])
        return dk, dv

    def _lost_parts(self, k: Tensor, source: int) -> Iterator[MaskPart]:
        """Yield parts of lost rows and the keys of a source, few enough at a time."""
        for span in self.rows.keys[source]:
            scores = k.shape[0] * self.q.shape[1] * span.count  # of a row
            most = max(MASK_ELEMENTS // max(scores, 1), 1)
            for first, end in self.lost_rows:
                for row in range(first, end, most):
                    sides = (row, min(most, end - row), span.place, span.count)
                    yield MaskPart(*sides, span.position, True)

    def _of_lost(
        self, part: MaskPart, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        call = self.rows
        dtype = accumulation_dtype(self.q.dtype)
        grad, q, delta, lse = (
            rows_of(x, part)
            for x in (self.lost_grad, self.own_q, self.lost_delta, self.lse)
        )
        dq, dk, dv, ds = math_backward(
            *(without_column(grad, v), q, k, v, lse, delta),
            *(call.mask.of_part(part, dtype), call.scale, call.softcap),
            *call.changes(part, q.dtype),
            replaced=call.mask.replaced(part),
        )
        add_bias_gradient(self.dbias, self.bias, part, ds)
        return dq, dk, dv

    def result(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what a backward returns, dq, dk, dv and dbias, given dk and dv."""
        dbias = as_bias_gradient(self.dbias, self.bias)
        return self.dq.to(self.q.dtype), dk, dv, dbias

    def _of_part(
        self, part: MaskPart, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        call = self.rows
        mask = call.mask.of_part(part, mask_dtype(self.q, call.kernel))
        grad, q, out = (rows_of(x, part) for x in (self.grad, self.q, self.out))
        lse = rows_of(self.lse, part)
        if self.delta is None:
            operands = (grad, q, k, v, out, lse)
            how = (part.triangular, call.scale, call.kernel, mask)
            return block_attention_backward(*operands, *how)
        delta, grad = rows_of(self.delta, part), without_column(grad, v)
        dq, dk, dv, ds = math_backward(
            *(grad, q, k, v, lse, delta, mask, call.scale, call.softcap),
            *call.changes(part, q.dtype),
        )
        add_bias_gradient(self.dbias, self.bias, part, ds)
        return dq, dk, dv


def _runs(rows: Tensor) -> list[tuple[int, int]]:
    """Find where runs of True begin and end, in bools [R, 1]."""
    edges = torch.nn.functional.pad(rows.flatten().to(torch.int8), (1, 1)).diff()
    begins, ends = (edges == n for n in (1, -1))
    pairs = zip(begins.nonzero().tolist(), ends.nonzero().tolist(), strict=True)
    return [(begin, end) for (begin,), (end,) in pairs]
