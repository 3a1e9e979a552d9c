"""What changes the scores of this rank's rows, as the step kernels take it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cpcompile.kernels.constants import Biasing, Changes, Dropping
from cpcompile.ops.steps.dropout import Dropout
from cpcompile.ops.steps.position_bias import PositionBias
from cpcompile.ops.steps.row_mask import RowMask


@dataclass(frozen=True)
class RowChanges:
    """Of the rows of a rank.

    softcap, dropout: as MaskedRows has them. bias: of positions, or None. raised: by
    what rows are raised, RowMask.highest.
    """

    softcap: float = 0.0
    dropout: Dropout | None = None
    bias: PositionBias | None = None
    raised: Tensor | None = None

    @classmethod
    def of(cls, mask: RowMask, softcap: float, dropout: Dropout | None) -> RowChanges:
        """With the bias of a mask, if it is one of positions."""
        if not isinstance(mask.bias, PositionBias):
            return cls(softcap, dropout)
        return cls(softcap, dropout, mask.bias, mask.highest)

    def at_keys(self, q_BHRD: Tensor, batch: slice, keys_K: Tensor) -> Changes:
        """For these of the batch, and keys at these positions; q: of all rows."""
        keys, dropping, biasing = keys_K.to(torch.int32), None, None
        dropout, bias = self.dropout, self.bias
        if dropout is not None:
            seeds, rows = (
                x.to(torch.int32) for x in (dropout.seeds_BH[batch], dropout.rows_R)
            )
            dropping = Dropping(dropout.drop_below, 1 - dropout.p, seeds, rows, keys)
        if bias is not None:
            B, H, R, _ = q_BHRD.shape
            table = bias.table.to(torch.float32).expand(B, H, -1)[batch]
            raised = table.new_zeros((1, 1, R))
            if self.raised is not None:
                raised = self.raised[..., 0].to(torch.float32)
            raised = raised.expand(B, H, -1)[batch]
            at = None if bias.is_by_key else bias.offsets(table.device).to(torch.int32)
            biasing = Biasing(table, keys, at, raised)
        return Changes(self.softcap, dropping, biasing)
