"""A mask of ranges by the step kernels: all keys of a source in one launch.

The Triton templates take two limits per row, as vectors that never decrease, and skip
the keys that no row of a block sees. Causal masks, windows, chunks, prefixes, packed
documents and padding at an end are such ranges. Keys lie in the order of their
positions on every rank, so that a position becomes a number of local keys. What else
changes scores and weights is computed by the same kernels, see row_changes.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cpcompile.geometry.mask_parts import TokenSpan
from cpcompile.geometry.visibility import ALL
from cpcompile.kernels.constants import ScoreModifiers
from cpcompile.ops.step.online_softmax import RunningAttention
from cpcompile.ops.step.row_changes import RowModifiers

Saved = tuple[Tensor, Tensor, Tensor, Tensor]  # grad, q, lse and delta, for a backward


@dataclass(frozen=True)
class VectorSteps:
    """The key ranges of this rank's rows, and which keys every source has."""

    lower: Tensor
    upper: Tensor
    keys: Sequence[tuple[TokenSpan, ...]]
    scale: float
    changes: RowModifiers

    def forward(
        self, running: RunningAttention, q: Tensor, k: Tensor, v: Tensor, source: int
    ) -> None:
        """Add what the rows of `running` find in the keys of a source.

        q: of these rows, `without_lost`.
        """
        from cpcompile.kernels import launch  # imports triton

        found = []
        for batch, upper, lower, changes in self._calls(q, k, source):
            out, lse = (
                None if x is None else x[batch] for x in (running.out, running.lse)
            )
            operands = (q[batch], k[batch], v[batch], out, lse)
            rest = (upper, lower, ALL, self.scale, False)
            found.append(launch.forward(*operands, *rest, changes=changes))
        outs, lses = zip(*found, strict=True)
        running.replace(_joined(outs), _joined(lses))

    def backward(
        self, saved: Saved, dq: Tensor, k: Tensor, v: Tensor, source: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, so far and of the keys of a source, and their dk and dv.

        saved: grad, q, lse and delta, as cp::attention_step_dkdv takes them. Results
        are in the accumulation dtype.
        """
        from cpcompile.kernels import launch  # imports triton

        found = []
        for batch, upper, lower, changes in self._calls(saved[1], k, source):
            grad, q, lse, delta = (x[batch] for x in saved)
            operands = (grad, q, k[batch], v[batch], lse, delta)
            rest = (upper, lower, ALL, self.scale, False)
            dk, dv = launch.dkdv(*operands, None, None, *rest, changes=changes)
            own = launch.dq(*operands, dq[batch], *rest, changes=changes)
            found.append((own, dk, dv))
        dqs, dks, dvs = zip(*found, strict=True)
        return _joined(dqs), _joined(dks), _joined(dvs)

    def add_bias_gradient(
        self, total: Tensor, saved: Saved, k: Tensor, v: Tensor, source: int
    ) -> None:
        """Add to `total`, like the table, what the keys of a source contribute.

        saved: as for `backward`. By distance each run of rows meets each run of keys.
        """
        from cpcompile.kernels.bias_gradient import dbias  # imports triton

        bias = self.changes.bias
        assert bias is not None, "the gradient of a bias that is there"
        every_row = (TokenSpan(0, 0, saved[1].shape[2]),)
        for batch, upper, lower, changes in self._calls(saved[1], k, source):
            own = total if len(total) == 1 else total[batch]
            for row in every_row if bias.is_by_key else bias.rows:
                for key in self.keys[source]:
                    rows, keys = _slice(row), _slice(key)
                    grad, q, lse, delta = (x[batch][:, :, rows] for x in saved)
                    operands = (grad, q, k[batch][:, :, keys], v[batch][:, :, keys])
                    high, low = (x[rows] - key.place for x in (upper, lower))
                    found = dbias(
                        *(*operands, lse, delta),
                        *(high, low, ALL, self.scale),
                        changes=changes.of_part(rows, keys),
                    )
                    entries = own.narrow(2, *bias.entries(row, key))
                    entries.add_(found.sum_to_size(entries.shape))

    def _calls(
        self, q: Tensor, k: Tensor, source: int
    ) -> list[tuple[slice, Tensor, Tensor, ScoreModifiers]]:
        """List the launches for a source, one for all or for each of the batch.

        A launch has a slice of the batch with the same limits, these limits, upper and
        lower [R], and what changes scores.
        """
        lower, upper = self.lower, self.upper
        spans, device = self.keys[source], lower.device
        positions = [torch.arange(x.position, x.stop, device=device) for x in spans]
        position = torch.cat(positions)
        uppers, lowers = (
            torch.searchsorted(position, x.contiguous(), out_int32=True)
            for x in (upper, lower)
        )
        padding = k.shape[2] - len(position)  # nobody sees it
        position = F.pad(position, (0, padding))
        batches = [slice(None)]
        if len(lower) > 1:
            batches = [slice(each, each + 1) for each in range(len(lower))]
        return [
            (batch, high, low, self.changes.at_keys(q, batch, position))
            for batch, high, low in zip(batches, uppers, lowers, strict=True)
        ]


def _slice(span: TokenSpan) -> slice:
    return slice(span.place, span.place + span.count)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
