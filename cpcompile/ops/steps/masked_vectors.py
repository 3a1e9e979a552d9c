"""A mask of ranges by the step kernels: all keys of a source in one launch.

The kernels of cp::attention_step take two limits per row, as vectors that never
decrease, and skip the keys that no row of a block sees. Causal masks, windows, chunks,
prefixes, packed documents and padding at an end are such ranges. Keys lie in the order
of their positions on every rank, so that a position becomes a number of local keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cpcompile.geometry.mask_blocks import Span
from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.steps.attention_step import attention_step
from cpcompile.ops.steps.attention_step_backward import (
    attention_step_dkdv,
    attention_step_dq,
)
from cpcompile.ops.steps.online_softmax import RunningAttention

KERNEL = StepKernel.TEMPLATE.value
_NO_LIMITS: tuple[list[int], ...] = ([], [], [], [])  # as integers: vectors say it


@dataclass(frozen=True)
class VectorSteps:
    """The key ranges of this rank's rows, and which keys every source has."""

    lower: Tensor
    upper: Tensor
    keys: Sequence[tuple[Span, ...]]
    scale: float

    def forward(
        self, running: RunningAttention, k: Tensor, v: Tensor, source: int
    ) -> None:
        """Add what the rows of `running` find in the keys of a source."""
        found = []
        for batch, upper, lower in self._calls(source):
            q, keys, values, out, lse = (
                None if x is None else x[batch]
                for x in (running.q, k, v, running.out, running.lse)
            )
            found.append(
                attention_step(
                    q,
                    keys,
                    values,
                    out,
                    lse,
                    upper,
                    lower,
                    *_NO_LIMITS,
                    scale=self.scale,
                    final=False,
                    kernel=KERNEL,
                )
            )
        outs, lses = zip(*found, strict=True)
        running.replace(_joined(outs), _joined(lses))

    def backward(
        self,
        saved: tuple[Tensor, Tensor, Tensor, Tensor],
        dq: Tensor,
        k: Tensor,
        v: Tensor,
        source: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq so far and of the keys of a source, and their dk and dv.

        saved: grad, q, lse and delta, as cp::attention_step_dkdv takes them. Results
        are in the accumulation dtype.
        """
        found = []
        for batch, upper, lower in self._calls(source):
            grad, q, lse, delta = (x[batch] for x in saved)
            operands = (grad, q, k[batch], v[batch], lse, delta)
            rest = (upper, lower, *_NO_LIMITS, self.scale, False, KERNEL)
            dk, dv = attention_step_dkdv(*operands, None, None, *rest)
            found.append((attention_step_dq(*operands, dq[batch], *rest), dk, dv))
        dqs, dks, dvs = zip(*found, strict=True)
        return _joined(dqs), _joined(dks), _joined(dvs)

    def _calls(self, source: int) -> list[tuple[slice, Tensor, Tensor]]:
        """Which of the batch have the same limits, and these: upper and lower [R]."""
        lower, upper = self.lower, self.upper
        spans, device = self.keys[source], lower.device
        positions = [torch.arange(x.position, x.stop, device=device) for x in spans]
        position = torch.cat(positions)
        uppers, lowers = (
            torch.searchsorted(position, x.contiguous(), out_int32=True)
            for x in (upper, lower)
        )
        if len(lower) == 1:
            return [(slice(None), uppers[0], lowers[0])]
        return [
            (slice(each, each + 1), uppers[each], lowers[each])
            for each in range(len(lower))
        ]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
