"""Attention dropout whose kept weights are a function of seeds and positions.

Whether query i of head h sees key j is told by the seed of (batch entry, head), i and j
alone, by mixing them twice. So it is the same for every number of ranks, strategy and
layout, in the forward and in the backward, and nothing of the size of the scores is
kept. The mixing is the end of MurmurHash3 (Appleby, public domain), in 32 bits. The
step kernels do the same in kernels/templates/shared.py.jinja.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cpcompile.geometry.blocks import Block

SEED_LIMIT = 1 << 31  # seeds are drawn below it
_FACTORS = (0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32))  # as int32 has them


@dataclass(frozen=True)
class Dropout:
    """Dropout of some rows: with probability p a weight is 0, else it is / (1 - p).

    seeds_BH: integers. rows_R: positions of the rows in their sequence.
    """

    p: float
    seeds_BH: Tensor
    rows_R: Tensor

    @property
    def drop_below(self) -> int:
        """Number of SEED_LIMIT values that drop a weight."""
        return round(self.p * SEED_LIMIT)

    def factors(self, block: Block, dtype: torch.dtype) -> Tensor:
        """Return what the weights [B, H, rows, keys] of a block are multiplied by."""
        rows = self.rows_R[block.row : block.row + block.rows].to(torch.int32)
        keys = torch.arange(block.keys, device=rows.device) + block.position
        by_row = _mixed(self.seeds_BH.to(torch.int32).unsqueeze(-1) ^ _mixed(rows + 1))
        bits = _mixed(by_row.unsqueeze(-1) ^ _mixed(keys.to(torch.int32) + 1))
        kept = bits.bitwise_and_(SEED_LIMIT - 1) >= self.drop_below
        return kept.to(dtype).div_(1 - self.p)


def _mixed(x: Tensor) -> Tensor:
    """Permute 32-bit integers so that all bits depend on all; return new memory."""
    x = x.clone()
    for shift, factor in zip((16, 13), _FACTORS, strict=True):
        x ^= _shifted(x, shift)
        x *= factor
    x ^= _shifted(x, 16)
    return x


def _shifted(x: Tensor, count: int) -> Tensor:
    """Compute x >> count without its sign."""
    return (x >> count).bitwise_and_((1 << (32 - count)) - 1)
