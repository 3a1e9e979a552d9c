"""The gradient of a bias of positions: a kernel in addition to those of a step.

It computes the scores once more and sums their gradients over what has one key or one
distance. Nothing is added by atomic operations, so that the sum is the same each time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cpcompile.kernels.configs import Kernel, StepConfig
from cpcompile.kernels.constants import RowLimits, ScoreModifiers
from cpcompile.kernels.launch import (
    default_config,
    gradient_operands,
    launch_kernel,
    sees_nothing,
)


def dbias(
    grad_BHRE: Tensor,
    q_BHRD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    lse_BHR: Tensor,
    delta_BHR: Tensor,
    limits: RowLimits,
    scale: float,
    *,
    changes: ScoreModifiers,
    config: StepConfig | None = None,
) -> Tensor:
    """Compute what the pairs of a chunk add to the gradient of `changes.biasing`.

    Arguments are those of launch.gradients; limits have no slices. The result is in
    float32.
    For a bias by key it is [B, H, K], of these keys. For a bias by distance it is
    [B, H, R + K - 1], where entry d + R - 1 is the sum over all pairs of key j and row
    i with j - i = d: rows, and keys, have to be consecutive in their sequences.
    """
    assert changes.biasing is not None, "the gradient of a bias that is there"
    by_key = changes.biasing.offsets_R is None
    (B, H, R, _), K = q_BHRD.shape, k_BGKD.shape[2]
    count = K if by_key else R + K - 1
    if sees_nothing(q_BHRD, k_BGKD, limits):
        return q_BHRD.new_zeros((B, H, max(count, 0)), dtype=torch.float32)
    visible = limits.visible
    assert visible.rows is None and visible.keys is None, f"dbias of {visible}"
    config = config or default_config(Kernel.DBIAS, q_BHRD, v_BGKE)
    block = config.block_n
    assert config.block_m == block, f"dbias has square tiles, got {config}"
    row_tiles, key_tiles = -(-R // block), -(-K // block)
    programs = key_tiles if by_key else row_tiles + key_tiles - 1
    shape = (1 if by_key else 2, B, H, programs * block)
    sums = q_BHRD.new_empty(shape, dtype=torch.float32)
    operands = (grad_BHRE, q_BHRD, k_BGKD, v_BGKE, lse_BHR, delta_BHR)
    visibility = (limits, scale, changes)
    tensors = gradient_operands(*operands)
    launch_kernel(Kernel.DBIAS, tensors, {}, *visibility, sums, config)
    if by_key:
        return sums[0, ..., :K]
    # Entry n of the second copy has j - i = n - (row_tiles - 1) block; of the first one
    # `block` less.
    both = F.pad(sums[0], (0, block)) + F.pad(sums[1], (block, 0))
    return both.narrow(-1, row_tiles * block - (R - 1), count)
