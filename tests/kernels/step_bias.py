"""A bias of positions for a StepCase: what the kernels read, and the same by pairs.

The keys of an earlier chunk, of which a step knows only out and lse, are the first of
the sequence. Every row has a number that is subtracted from its bias, too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cpcompile.kernels.constants import BiasConstants

BEYOND = 5  # tokens of the sequences after those of the step


@dataclass(frozen=True)
class StepBias:
    """A table [B, H, n] in float32, of `kv_len` keys or of distances to `q_len` rows.

    rows_R, keys_K: positions of those of the step. row_shift_BHR: float32.
    """

    table: Tensor
    by_key: bool
    rows_R: Tensor
    keys_K: Tensor
    row_shift_BHR: Tensor

    @classmethod
    def of(
        cls, kind: str, heads: tuple[int, int], rows_R: Tensor, keys_K: Tensor
    ) -> "StepBias":
        """Random numbers; kind has "key" or "distance", and "hidden" for some -inf."""
        draw = torch.Generator().manual_seed(7)
        q_len, kv_len = (int(x.max()) + 1 + BEYOND for x in (rows_R, keys_K))
        by_key = "key" in kind
        count = kv_len if by_key else q_len + kv_len - 1
        table = 2 * torch.randn(*heads, count, generator=draw)
        if "hidden" in kind:
            table[torch.rand(table.shape, generator=draw) < 0.2] = -torch.inf
            table[..., : count // 3] = -torch.inf  # whole tiles of some rows
        row_shift = torch.randn(*heads, len(rows_R), generator=draw)
        return cls(table, by_key, rows_R, keys_K, row_shift)

    def entries(self, keys: Tensor) -> Tensor:
        """[R, keys], which entry a pair reads."""
        if self.by_key:
            return keys.expand(len(self.rows_R), -1)
        return keys + self._offsets[:, None]

    def added(self, keys: Tensor) -> Tensor:
        """[B, H, R, keys] in float64: the bias without what its row is shifted by."""
        bias = self.table.double()[..., self.entries(keys)]
        return bias - self.row_shift_BHR.double()[..., None]

    def biasing(self) -> BiasConstants:
        offsets = None if self.by_key else self._offsets.int()
        return BiasConstants(self.table, self.keys_K.int(), offsets, self.row_shift_BHR)

    def sums(self, pairs: Tensor) -> Tensor:
        """Numbers [B, H, R, K] of the pairs of a step, summed as dbias gives them."""
        if self.by_key:
            return pairs.sum(2)
        R, K = pairs.shape[2:]
        of_pair = torch.arange(K) - torch.arange(R)[:, None] + R - 1
        found = pairs.new_zeros(*pairs.shape[:2], R + K - 1)
        return found.index_add_(2, of_pair.flatten(), pairs.flatten(2))

    @property
    def _offsets(self) -> Tensor:
        q_len = self.table.shape[-1] - int(self.keys_K.max()) - BEYOND
        return q_len - 1 - self.rows_R
