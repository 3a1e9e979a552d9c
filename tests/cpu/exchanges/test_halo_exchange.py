"""cp::halo_exchange on real ranks: tokens, and gradients that go back to them.

Nothing is computed by the forward, so that it is equal; the reference pads the whole
sequence with zeros.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile.geometry.layout import Chunks
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import assert_close
from tests.support.whole_sequences import normal

HALOS = [(0, 0), (1, 1), (3, 0), (0, 2), (7, 5), (40, 40)]
LENGTHS = [16, 13, 5, 2, 1]  # of the last ones, ranks have no token


def padded(whole: Tensor, dim: int, halo: tuple[int, int], rank: int) -> Tensor:
    """What a rank has to get."""
    chunks = Chunks(whole.shape[dim], dist.get_world_size())
    start, count = chunks.start(rank), chunks.count(rank)
    after = (0, 0) * (whole.ndim - 1 - dim)
    found = F.pad(whole, (*after, *halo)).narrow(dim, start, count + sum(halo))
    return found if count else torch.zeros_like(found)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.int64],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
@on_ranks("world")
def test_tokens_and_gradients(dtype, dim, length, world) -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    ranks = dist.get_world_size()
    chunks = Chunks(length, ranks)
    whole = normal((*(3, 2)[:dim], length, *(3, 2)[dim:]), dtype)
    own = slice(chunks.start(rank), chunks.start(rank + 1))
    for halo in HALOS:
        x = whole.movedim(dim, 0)[own].movedim(0, dim)
        x = x.clone().requires_grad_(dtype.is_floating_point)
        args = (dim, length, *halo, group.group_name)
        out = torch.ops.cp.halo_exchange(x, *args)
        wanted = padded(whole, dim, halo, rank)
        assert out.shape == wanted.shape and out.dtype == dtype
        assert torch.equal(out, wanted)
        if not dtype.is_floating_point:
            continue
        out.backward(normal(out.shape, dtype, rank))
        leaf = whole.detach().to(torch.float64, copy=True).requires_grad_()
        for each in range(ranks):
            result = padded(leaf, dim, halo, each)
            if result.requires_grad:
                result.backward(normal(result.shape, dtype, each).double())
        grad = leaf.grad.movedim(dim, 0)[own].movedim(0, dim)
        assert_close("gradient", x.grad, grad, grad.to(dtype))
