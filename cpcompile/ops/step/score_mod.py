"""A function of scores, as flex_attention has it, that is computed block by block.

    score_mod(score, b, h, q_idx, kv_idx)  ->  forward and backward of one block

An operator takes no function. So it is handed over as a text, which
passes/model/patterns/score_programs.py writes, of calls of aten:

    def forward(values, score, b, h, q_idx, kv_idx):         the new scores
    def backward(values, score, b, h, q_idx, kv_idx, grad):  grads of score and values

score is [B, H, rows, keys]; b, h, q_idx and kv_idx are integers of one dimension each.
values: all numbers that it captures, [1, 1, n], in the place of a bias. It hides keys
by -inf itself; key ranges and segment ids say in addition which parts are not computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cpcompile.geometry.blocks import Block


@dataclass(frozen=True)
class ScoreMod:
    """A function of scores, for some rows.

    text: see above. table: the values. rows_R: positions of the rows in their sequence.
    first_head, last_head: as in AttentionSpec.
    """

    text: str
    table: Tensor
    rows_R: Tensor
    first_head: int = 0
    last_head: int = 0

    def of_block(self, block: Block) -> BlockScoreMod:
        """Return the same function for one block."""
        rows = self.rows_R[block.row : block.row + block.rows].to(torch.int32)
        heads = self.first_head, self.last_head
        return BlockScoreMod(self.text, self.table, rows, block.position, *heads)


@dataclass(frozen=True)
class BlockScoreMod:
    """A function of scores, for rows at rows_R and the keys from `first_key` on."""

    text: str
    table: Tensor
    rows_R: Tensor
    first_key: int
    first_head: int = 0
    last_head: int = 0

    def forward(self, scores_BHRK: Tensor) -> Tensor:
        """Compute the new scores."""
        call = functions(self.text)["forward"]
        scores: Tensor = call(self.table, scores_BHRK, *self._index(scores_BHRK))
        return scores

    def backward(self, scores_BHRK: Tensor, grad_BHRK: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradients of the old scores, and of the table; 0 if it needs none."""
        call = functions(self.text)["backward"]
        index = self._index(scores_BHRK)
        grads: tuple[Tensor, Tensor] = call(self.table, scores_BHRK, *index, grad_BHRK)
        return grads

    def _index(self, scores_BHRK: Tensor) -> list[Tensor]:
        b, h, q_idx, kv_idx = index_of(scores_BHRK, self.rows_R, self.first_key)
        if self.last_head:
            h = (h + self.first_head).clamp(max=self.last_head)
        return [b, h, q_idx, kv_idx]


def index_of(scores_BHRK: Tensor, rows_R: Tensor, first_key: int) -> list[Tensor]:
    """Return b, h, q_idx and kv_idx, int32, each in its own of four dimensions."""
    B, H, _, K = scores_BHRK.shape
    device = scores_BHRK.device
    b, h, key = (torch.arange(n, dtype=torch.int32, device=device) for n in (B, H, K))
    numbers = (b, h, rows_R, key + first_key)
    return [
        x.view(*(-1 if dim == own else 1 for dim in range(4)))
        for own, x in enumerate(numbers)
    ]


@cache  # layers and steps share it
def functions(text: str) -> dict[str, Callable[..., Any]]:
    """Run a text, and return its names, among them `forward` and `backward`."""
    names: dict[str, Any] = {
        "torch": torch,
        "device": torch.device,
        "inf": float("inf"),
        "nan": float("nan"),
    }
    exec(compile(text, "<score_mod>", "exec"), names)
    return names
