"""The work of some rows on one chunk of keys: which blocks of scores, and how.

The operators differ in how keys come here; what is computed on them is the same, and is
here. The blocks are those of a causal limit, or of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cpcompile.geometry.blocks import Block
from cpcompile.geometry.mask_tiles import TokenSpan
from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.step.block_attention import (
    block_attention,
    keys_of,
    mask_dtype,
    rows_of,
)
from cpcompile.ops.step.dropout import Dropout
from cpcompile.ops.step.math_attention import accumulation_dtype
from cpcompile.ops.step.online_softmax import RunningAttention
from cpcompile.ops.step.row_mask import RowMask
from cpcompile.ops.step.score_mod import BlockScoreMod, ScoreMod
from cpcompile.ops.step.template_steps import TemplateSteps


@dataclass(frozen=True)
class RowWork:
    """What the rows of a rank compute on one chunk of keys.

    blocks: of the scores, by `kernel`.
    templates: compute the whole chunk, in place of blocks.
    mask: None where the blocks say all that the rows see.
    keys: of the chunk, as spans; of a chunk under a mask.
    """

    kernel: StepKernel
    scale: float
    blocks: Sequence[Block] = ()
    templates: TemplateSteps | None = None
    mask: RowMask | None = None
    keys: Sequence[TokenSpan] = ()
    softcap: float = 0.0
    dropout: Dropout | None = None
    score_mod: ScoreMod | None = None

    def forward(
        self, running: RunningAttention, k: Tensor, v: Tensor, final: bool = False
    ) -> None:
        """Add what the rows of `running` see of the chunk; `final`: of the last one."""
        q = running.q if self.mask is None else self.mask.without_lost(running.q)
        if self.templates is not None:
            before = (running.out, running.lse)
            running.replace(*self.templates.forward(q, k, v, *before, final))
            return
        for block in self.blocks:
            factors, score_mod = self.modifiers(block, q.dtype)
            part = block_attention(
                rows_of(q, block),
                keys_of(k, block),
                keys_of(v, block),
                block.triangular,
                self.scale,
                self.kernel,
                self.mask_of(block, q),
                self.softcap,
                factors,
                score_mod,
            )
            running.merge(block, *part)

    def mask_of(self, block: Block, q: Tensor) -> Tensor | None:
        """Return the additive mask of a block, in the dtype that the kernel takes."""
        if self.mask is None:
            return None
        return self.mask.of_block(block, mask_dtype(q, self.kernel))

    def modifiers(
        self, block: Block, dtype: torch.dtype
    ) -> tuple[Tensor | None, BlockScoreMod | None]:
        """Return factors of dropout, in the accumulation dtype, and the score_mod."""
        factors = score_mod = None
        if self.dropout is not None:
            factors = self.dropout.factors(block, accumulation_dtype(dtype))
        if self.score_mod is not None:
            score_mod = self.score_mod.of_block(block)
        return factors, score_mod
