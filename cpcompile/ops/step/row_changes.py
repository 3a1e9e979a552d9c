"""Changes of the scores of this rank's rows, as the step kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cpcompile.kernels.constants import (
    BiasConstants,
    DropoutConstants,
    ScoreModConstants,
    ScoreModifiers,
)
from cpcompile.ops.step.dropout import Dropout
from cpcompile.ops.step.position_bias import PositionBias
from cpcompile.ops.step.row_mask import RowMask, filled_number
from cpcompile.ops.step.score_mod import ScoreMod


@dataclass(frozen=True)
class RowModifiers:
    """The changes of scores and weights in the rows of a rank.

    softcap, dropout: as RowWork has them. bias: of positions, or None. row_shift:
    as RowMask has it. functions: AttentionInputs.inlined.
    """

    softcap: float = 0.0
    dropout: Dropout | None = None
    bias: PositionBias | None = None
    row_shift: Tensor | None = None
    score_mod: ScoreMod | None = None
    functions: str = ""

    @classmethod
    def of(
        cls,
        mask: RowMask,
        softcap: float,
        dropout: Dropout | None,
        score_mod: ScoreMod | None = None,
        functions: str = "",
    ) -> RowModifiers:
        """Make the changes, with the bias of a mask if it is one of positions."""
        if not isinstance(mask.bias, PositionBias):
            return cls(softcap, dropout, None, None, score_mod, functions)
        return cls(softcap, dropout, mask.bias, mask.row_shift)

    def at_keys(self, q_BHRD: Tensor, batch: slice, keys_K: Tensor) -> ScoreModifiers:
        """Return the changes for a slice of the batch and keys at these positions.

        q: of all rows.
        """
        keys, dropping, biasing = keys_K.to(torch.int32), None, None
        dropout, bias = self.dropout, self.bias
        if dropout is not None:
            seeds, rows = (
                x.to(torch.int32) for x in (dropout.seeds_BH[batch], dropout.rows_R)
            )
            dropping = DropoutConstants(
                dropout.drop_below, 1 - dropout.p, seeds, rows, keys
            )
        if bias is not None:
            B, H, R, _ = q_BHRD.shape
            # FILLED and what is lower count alike, as in RowMask.of_block.
            least = filled_number(torch.float32)
            table = bias.table.to(torch.float32).expand(B, H, -1)[batch]
            table = table.clamp(min=least).masked_fill(table == -torch.inf, -torch.inf)
            row_shift = table.new_zeros((1, 1, R))
            if self.row_shift is not None:
                row_shift = self.row_shift[..., 0].to(torch.float32).clamp(min=least)
            row_shift = row_shift.expand(B, H, -1)[batch]
            at = None if bias.is_by_key else bias.offsets(table.device).to(torch.int32)
            biasing = BiasConstants(table, keys, at, row_shift)
        scoring = None
        if self.score_mod is not None:
            entries = torch.arange(len(q_BHRD), device=keys.device)[batch]
            values, rows = self.score_mod.table[0, 0], self.score_mod.rows_R
            at_rows, at_batch = rows.to(torch.int32), entries.to(torch.int32)
            scoring = ScoreModConstants(self.functions, values, at_rows, keys, at_batch)
        return ScoreModifiers(self.softcap, dropping, biasing, scoring)
