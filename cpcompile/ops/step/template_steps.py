"""Whole chunks of keys by the step templates, launched outside of compiled graphs.

A template takes RowLimits: the integers of a `Visible`, or under a mask two limits per
row, as vectors that never decrease. It skips the keys that no row of a tile sees.
Causal masks, windows, chunks, prefixes, packed documents and padding at an end are such
limits. Keys lie in the order of their positions on every rank, so that a position
becomes a number of local keys. What else changes scores and weights is computed by the
same kernels, see row_changes.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor

from cpcompile.geometry.mask_tiles import TokenSpan
from cpcompile.kernels.configs import Kernel
from cpcompile.kernels.constants import NO_MODIFIERS, RowLimits, ScoreModifiers
from cpcompile.ops.step.position_bias import PositionBias
from cpcompile.ops.step.row_changes import RowModifiers
from cpcompile.ops.step.row_mask import RowMask

Saved = tuple[Tensor, Tensor, Tensor, Tensor]  # grad, q, lse and delta, for a backward


@dataclass(frozen=True)
class Launch:
    """One launch: for which entries of the batch, their limits, and changed scores.

    batch: None for all of them.
    """

    limits: RowLimits
    batch: slice | None = None
    modifiers: ScoreModifiers = NO_MODIFIERS

    @overload
    def of_batch(self, x: Tensor) -> Tensor: ...

    @overload
    def of_batch(self, x: Tensor | None) -> Tensor | None: ...

    def of_batch(self, x: Tensor | None) -> Tensor | None:
        """Return the entries of this launch."""
        return x if x is None or self.batch is None else x[self.batch]


@dataclass(frozen=True)
class TemplateSteps:
    """The launches that compute what some rows see of one chunk of keys.

    keys, bias: the spans of the chunk, and a bias of positions, for its gradient.
    """

    launches: Sequence[Launch]
    scale: float
    keys: Sequence[TokenSpan] = ()
    bias: PositionBias | None = None

    @classmethod
    def of_mask(
        cls,
        mask: RowMask,
        modifiers: RowModifiers,
        q: Tensor,
        key_count: int,
        keys: Sequence[TokenSpan],
        scale: float,
    ) -> TemplateSteps:
        """Make the launches of a mask of ranges, for all or for each of the batch.

        keys: the chunk; it may be padded to `key_count`.
        """
        device = mask.lower.device
        positions = [torch.arange(x.position, x.stop, device=device) for x in keys]
        position = torch.cat(positions)
        uppers, lowers = (
            torch.searchsorted(position, x.contiguous(), out_int32=True)
            for x in (mask.upper, mask.lower)
        )
        padding = key_count - len(position)  # nobody sees it
        position = F.pad(position, (0, padding))
        batches: list[slice | None] = [None]
        if len(mask.lower) > 1:
            batches = [slice(entry, entry + 1) for entry in range(len(mask.lower))]
        launches = [
            Launch(
                RowLimits(upper=upper, lower=lower),
                batch,
                modifiers.at_keys(q, batch or slice(None), position),
            )
            for batch, upper, lower in zip(batches, uppers, lowers, strict=True)
        ]
        return cls(launches, scale, keys=keys, bias=modifiers.bias)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None,
        lse: Tensor | None,
        final: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse, with what the rows see of the chunk; new tensors."""
        from cpcompile.kernels import launch  # imports triton

        results = [
            launch.forward(
                x.of_batch(q),
                x.of_batch(k),
                x.of_batch(v),
                x.of_batch(out),
                x.of_batch(lse),
                x.limits,
                self.scale,
                final,
                changes=x.modifiers,
            )
            for x in self.launches
        ]
        outs, lses = zip(*results, strict=True)
        return _joined(outs), _joined(lses)

    def gradients(
        self,
        of_keys: bool,
        saved: Saved,
        k: Tensor,
        v: Tensor,
        sums: Sequence[Tensor] = (),
        final: bool = False,
    ) -> list[Tensor]:
        """Return [dk, dv] or [dq], as cp::attention_step_backward does."""
        from cpcompile.kernels import launch  # imports triton

        kernel, results = Kernel.DKDV if of_keys else Kernel.DQ, []
        for x in self.launches:
            grad, q, lse, delta = (x.of_batch(y) for y in saved)
            operands = (grad, q, x.of_batch(k), x.of_batch(v), lse, delta)
            rest = ([x.of_batch(y) for y in sums], x.limits, self.scale, final)
            results.append(
                launch.gradients(kernel, *operands, *rest, changes=x.modifiers)
            )
        return [_joined(parts) for parts in zip(*results, strict=True)]

    def add_bias_gradient(
        self, total: Tensor, saved: Saved, k: Tensor, v: Tensor
    ) -> None:
        """Add to `total`, like the table, what the chunk contributes.

        By distance each run of rows meets each run of keys.
        """
        from cpcompile.kernels.bias_gradient import dbias  # imports triton

        bias = self.bias
        assert bias is not None, "the gradient of a bias that is there"
        every_row = (TokenSpan(0, 0, saved[1].shape[2]),)
        for x in self.launches:
            upper, lower = x.limits.upper, x.limits.lower
            own = total if len(total) == 1 else x.of_batch(total)
            for row in every_row if bias.is_by_key else bias.rows:
                for key in self.keys:
                    rows, keys = _slice(row), _slice(key)
                    grad, q, lse, delta = (x.of_batch(y)[:, :, rows] for y in saved)
                    k_part, v_part = (x.of_batch(y)[:, :, keys] for y in (k, v))
                    part = dbias(
                        grad,
                        q,
                        k_part,
                        v_part,
                        lse,
                        delta,
                        RowLimits(
                            upper=upper[rows] - key.place, lower=lower[rows] - key.place
                        ),
                        self.scale,
                        changes=x.modifiers.of_part(rows, keys),
                    )
                    entries = own.narrow(2, *bias.entries(row, key))
                    entries.add_(part.sum_to_size(entries.shape))


def _slice(span: TokenSpan) -> slice:
    return slice(span.place, span.place + span.count)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
