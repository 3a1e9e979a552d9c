"""What is saved for the backward depends on sizes, what ranks exchange must not.

With 31 tokens on 2 ranks the partitioner saves other values on each of them, and on one
rank the maxima of the forward could be made again from what is saved.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from cpcompile import config
from cpcompile.compile import warm_start
from cpcompile.compile.warm_start import exchange_texts
from cpcompile.torch_patches import dead_collectives
from tests.cpu.against_one_process import compare
from tests.cpu.on_ranks import on_ranks
from tests.cpu.one_call import message_of


class Maxima(nn.Module):
    """Two reductions over the sequence, whose maxima the ranks compare."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.back = nn.Parameter(torch.randn(2, 4, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = x.contiguous().mT.contiguous().mT  # its memory is that of [B, 8, S]
        q = self.project(y).unflatten(2, (2, 4)).transpose(1, 2)
        z = F.scaled_dot_product_attention(q, q, q)
        y = y + torch.einsum("bhtd,hdc->btc", z, self.back)
        return y.amax(1).mean() + y.logsumexp((0, 1)).mean()


class Reversed(nn.Module):
    """Attention whose result is gathered; the last of 3 ranks pads its 3 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.project(x).unflatten(2, (2, 4)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        y = (x + self.out(y))[:, torch.arange(x.shape[1] - 1, -1, -1)]
        return y.gather(1, y.detach().argsort(dim=1, stable=True))


class GatheredTwice(nn.Module):
    """A convolution and a group norm gather the same; the last rank pads its part."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.convolve, self.norm = nn.Conv1d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x)
        q, k = (
            y.unflatten(2, (2, 4)).transpose(1, 2)
            for y in (self.convolve(x.mT).mT, self.out(x))
        )
        y = F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)
        return y + self.norm(x.mT).mT


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@on_ranks(2)
def test_all_ranks_merge_equal_collectives(inner):
    compare(GatheredTwice, (2, 13, 8), 2, inner=inner, strategy="ulysses").check()


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@on_ranks(3)
def test_no_rank_repeats_attention(inner):
    with dead_collectives.partitions() as seen, config.patch(unroll=0):
        got = compare(Reversed, (2, 13, 8), 3, inner=inner, strategy="ring")
    got.check()
    backward = exchange_texts(seen)["exchanges of the backward"]
    assert "ring_attention_backward" in backward
    assert "ring_attention," not in backward


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("unroll", [0, 8])
@on_ranks(2)
def test_no_rank_repeats_a_collective(inner, unroll):
    compare_maxima(inner, unroll).check()


def compare_maxima(inner, unroll):
    with config.patch(unroll=unroll):
        return compare(Maxima, (3, 31, 8), 2, inner=inner, strategy="ring")


@on_ranks(2)
def test_another_order_on_one_rank_is_an_error():
    """It would be a hang of the backward."""

    def turned(seen):
        texts, rank = exchange_texts(seen), dist.get_rank()
        return {k: ", ".join(x.split(", ")[:: 1 - 2 * rank]) for k, x in texts.items()}

    with mock.patch.object(warm_start, "exchange_texts", turned):
        text = message_of(lambda: compare_maxima("aot_eager", 0))
    assert "exchanges of the backward: rank 0 has ring_attention_backward" in text
    assert "rank 1 has all_reduce" in text
