"""A mask of ranges by the step kernels: all keys of a source in one launch.

The Triton templates take two limits per row, as vectors that never decrease, and skip
the keys that no row of a block sees. Causal masks, windows, chunks, prefixes, packed
documents and padding at an end are such ranges. Keys lie in the order of their
positions on every rank, so that a position becomes a number of local keys. A softcap
and dropout are computed by the same kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cpcompile.geometry.mask_blocks import Span
from cpcompile.geometry.visibility import ALL
from cpcompile.kernels.constants import Changes, Dropping
from cpcompile.ops.steps.dropout import Dropout
from cpcompile.ops.steps.online_softmax import RunningAttention


@dataclass(frozen=True)
class VectorSteps:
    """The key ranges of this rank's rows, and which keys every source has.

    softcap, dropout: as MaskedRows has them.
    """

    lower: Tensor
    upper: Tensor
    keys: Sequence[tuple[Span, ...]]
    scale: float
    softcap: float = 0.0
    dropout: Dropout | None = None

    def forward(
        self, running: RunningAttention, k: Tensor, v: Tensor, source: int
    ) -> None:
        """Add what the rows of `running` find in the keys of a source."""
        from cpcompile.kernels import launch  # imports triton

        found = []
        for batch, upper, lower, changes in self._calls(source, k.shape[2]):
            q, keys, values, out, lse = (
                None if x is None else x[batch]
                for x in (running.q, k, v, running.out, running.lse)
            )
            assert q is not None and keys is not None and values is not None
            operands = (q, keys, values, out, lse, upper, lower, ALL, self.scale, False)
            found.append(launch.forward(*operands, changes=changes))
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
        from cpcompile.kernels import launch  # imports triton

        found = []
        for batch, upper, lower, changes in self._calls(source, k.shape[2]):
            grad, q, lse, delta = (x[batch] for x in saved)
            operands = (grad, q, k[batch], v[batch], lse, delta)
            rest = (upper, lower, ALL, self.scale, False)
            dk, dv = launch.dkdv(*operands, None, None, *rest, changes=changes)
            own = launch.dq(*operands, dq[batch], *rest, changes=changes)
            found.append((own, dk, dv))
        dqs, dks, dvs = zip(*found, strict=True)
        return _joined(dqs), _joined(dks), _joined(dvs)

    def _calls(
        self, source: int, count: int
    ) -> list[tuple[slice, Tensor, Tensor, Changes]]:
        """Which of the batch have the same limits, and these: upper and lower [R].

        count: of the keys of the source, with padding.
        """
        lower, upper = self.lower, self.upper
        spans, device = self.keys[source], lower.device
        positions = [torch.arange(x.position, x.stop, device=device) for x in spans]
        position = torch.cat(positions)
        uppers, lowers = (
            torch.searchsorted(position, x.contiguous(), out_int32=True)
            for x in (upper, lower)
        )
        position = F.pad(position, (0, count - len(position)))  # nobody sees padding
        if len(lower) == 1:
            every = slice(None)
            return [(every, uppers[0], lowers[0], self._changes(every, position))]
        batches = [slice(each, each + 1) for each in range(len(lower))]
        return [
            (batch, uppers[each], lowers[each], self._changes(batch, position))
            for each, batch in enumerate(batches)
        ]

    def _changes(self, batch: slice, position: Tensor) -> Changes:
        """For these of the batch, and keys of these positions."""
        dropout = self.dropout
        if dropout is None:
            return Changes(self.softcap)
        seeds, rows, keys = (
            x.to(torch.int32)
            for x in (dropout.seeds_BH[batch], dropout.rows_R, position)
        )
        dropping = Dropping(dropout.drop_below, 1 - dropout.p, seeds, rows, keys)
        return Changes(self.softcap, dropping)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
