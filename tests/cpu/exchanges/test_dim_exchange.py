"""cp::dim_exchange on real ranks: values and gradients; nothing is computed."""

import itertools

import pytest
import torch
import torch.distributed as dist

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile.geometry.layout import Chunks
from tests.cpu.on_ranks import on_ranks
from tests.support.whole_sequences import normal


def local(whole, dim):
    """What this rank holds of it."""
    rank, chunks = dist.get_rank(), Chunks(whole.shape[dim], dist.get_world_size())
    return whole.narrow(dim, chunks.start(rank), chunks.count(rank))


def exchange(x, source, target, whole):
    sizes = whole.shape[source], whole.shape[target]
    group = dist.group.WORLD.group_name
    return torch.ops.cp.dim_exchange(x, source, sizes[0], target, sizes[1], group)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool]
)
@pytest.mark.parametrize("shape", [(4, 6, 8), (5, 7, 3), (1, 9, 2), (2, 0, 4)])
@pytest.mark.parametrize("world", [2, 3, 4])
@on_ranks("world")
def test_values(world, shape, dtype):
    """Sizes that the ranks divide or not, fewer entries than ranks, and none."""
    whole = normal(shape, dtype)
    for source, target in itertools.permutations(range(len(shape)), 2):
        x = local(whole, source)
        x = x.transpose(0, 1).contiguous().transpose(0, 1)  # any strides will do
        found = exchange(x, source, target, whole)
        assert found.is_contiguous() and found.dtype == dtype
        assert torch.equal(found, local(whole, target)), (source, target)
        assert torch.equal(exchange(found, target, source, whole), x)


@on_ranks(3)
def test_gradients_go_the_way_back():
    shape = (2, 7, 5)
    whole, weight = normal(shape, torch.float64), normal(shape, torch.float64).cos()
    x = local(whole, 1).clone().requires_grad_()
    (exchange(x, 1, 2, whole) * local(weight, 2)).sum().backward()
    assert torch.equal(x.grad, local(weight, 1))


@on_ranks(2)
def test_other_operands_are_refused():
    whole = normal((2, 6, 4), torch.float64)
    with pytest.raises(
        ValueError, match=r"got dimensions 1 and 1 .* needed two of its"
    ):
        exchange(local(whole, 1), 1, 1, whole)
    with pytest.raises(ValueError, match="needed 3 entries on dim 1 and 4 on dim 2"):
        exchange(whole, 1, 2, whole)
