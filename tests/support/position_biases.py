"""A bias of positions as a bias of pairs."""

from __future__ import annotations

import torch
from torch import Tensor


def of_pairs(bias: Tensor, q_len: int, kv_len: int) -> Tensor:
    """[.., .., q_len or 1, kv_len]: every pair looked up; one of pairs as it is."""
    if bias.ndim == 4:
        return bias
    if bias.shape[2] == kv_len:
        return bias.unsqueeze(2)
    distance = torch.arange(kv_len) - torch.arange(q_len).unsqueeze(1)
    return bias[:, :, distance + q_len - 1]
