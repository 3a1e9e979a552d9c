"""Gradients of masked attention: of this rank's rows, on one source after another."""

from __future__ import annotations

from torch import Tensor

from cpcompile.geometry.mask_parts import Part
from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.steps.block_attention import row_dots, without_column
from cpcompile.ops.steps.masked_block import (
    mask_dtype,
    masked_block_backward,
    masked_math_backward,
)
from cpcompile.ops.steps.masked_steps import MaskedRows
from cpcompile.ops.steps.math_attention import accumulation_dtype, finite
from cpcompile.ops.steps.position_bias import (
    add_bias_gradient,
    as_bias_gradient,
    zero_bias_gradient,
)
from cpcompile.ops.steps.row_mask import keys_of, rows_of


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
        self.bias = rows.score_mod or rows.mask.bias
        self.dbias = zero_bias_gradient(q, self.bias, bias_grad)

    def of_source(self, k: Tensor, v: Tensor, source: int) -> list[Tensor]:
        """dk and dv of the keys of a source, in the accumulation dtype."""
        vectors = self.rows.vectors
        if vectors is not None and self.rows.blocks.sees(source):
            assert self.delta is not None, "the step kernels read delta"
            saved = (without_column(self.grad, v), self.q, self.lse, self.delta)
            self.dq, dk, dv = vectors.backward(saved, self.dq, k, v, source)
            if self.dbias.numel():
                vectors.add_bias_gradient(self.dbias, saved, k, v, source)
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
        dbias = as_bias_gradient(self.dbias, self.bias)
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
            how = (call.scale, call.kernel, part.triangular)
            return masked_block_backward(*operands, *how)
        delta, grad = rows_of(self.delta, part), without_column(grad, v)
        dq, dk, dv, ds = masked_math_backward(
            *(grad, q, k, v, delta, lse, mask, call.scale, call.softcap),
            *call.changes(part, q.dtype),
        )
        add_bias_gradient(self.dbias, self.bias, part, ds)
        return dq, dk, dv
