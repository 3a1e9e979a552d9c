"""Backwards that meet gradients unlike the values: in another order, or split."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.cpu.against_one_process import compare
from tests.cpu.on_ranks import on_ranks

sdpa = F.scaled_dot_product_attention


class SequenceFirst(nn.Module):
    """Batch first outside, sequence first inside: a gradient in another order.

    That of the mean is expanded, so that the part of a rank is made contiguous.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(48, 4, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0].square().mean()


class Residual(SequenceFirst):
    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0]


class Latents(nn.Module):
    """Attention splits queries that are a parameter, of one token here."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 16))

    def forward(self, x):
        return sdpa(self.latents.expand(x.shape[0], -1, -1), x, x)


class Windows(nn.Module):
    """Means of windows, three of which two ranks do not split."""

    def forward(self, x):
        means = x.unflatten(1, (-1, 4)).mean(2, keepdim=True)
        return sdpa(x, x, x) + means.expand(-1, -1, 4, -1).flatten(1, 2)


class GroupNorm(nn.Module):
    """A gradient in another order than DTensor says, for a kernel that reads memory."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 16)

    def forward(self, x):
        y = self.norm((x + sdpa(x, x, x)).transpose(1, 2)).transpose(1, 2)
        return y.norm() / 10


PROGRAMS = {
    SequenceFirst: (2, 64, 48),
    Latents: (2, 12, 16),
    Windows: (2, 12, 16),
    GroupNorm: (3, 12, 16),
}


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@pytest.mark.parametrize("door", ["plain", "dtensor"])
@pytest.mark.parametrize("make", PROGRAMS)
@on_ranks(2)
def test_gradients_are_those_of_one_process(make, door, strategy):
    compare(make, PROGRAMS[make], 2, door, strategy=strategy).check()


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@on_ranks(3)
def test_a_rank_without_tokens_shards_what_others_shard(strategy):
    """Nothing is wrong with an empty part: what is done is decided by the whole."""
    compare(Residual, (2, 2, 48), 3, strategy=strategy).check()
