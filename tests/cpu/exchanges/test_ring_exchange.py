"""Messages around a real ring arrive, whatever is waited for first; none is left."""

import pytest
import torch
import torch.distributed as dist

import cpcompile.ops  # noqa: F401  registers the operators
from tests.cpu.on_ranks import on_ranks

ring_shift = torch.ops.cp.ring_shift.default
ring_wait = torch.ops.cp.ring_wait.default


def group() -> str:
    return dist.group.WORLD.group_name


def message(rank, number, dtype=torch.float32):
    """Two tensors of different shapes that say who sends them."""
    value = 10 * rank + number
    return [
        torch.full((2, 3), value, dtype=dtype),
        torch.full((4,), -value, dtype=dtype),
    ]


def previous(step=1):
    return (dist.get_rank() - step) % dist.get_world_size()


def assert_arrived(got, rank, number, dtype=torch.float32):
    """And that nothing is left that nobody has waited for."""
    assert all(map(torch.equal, got, message(rank, number, dtype)))
    assert all(x.dtype == dtype for x in got)
    assert torch._C._distributed_c10d._get_work_registry_size() == 0


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@on_ranks("world")
def test_the_previous_rank_sends(world, dtype):
    sent = message(dist.get_rank(), 1, dtype)
    arriving = ring_shift(sent, group(), "a test")
    assert torch._C._distributed_c10d._get_work_registry_size() > 0
    got = [ring_wait(x, None, "a test") for x in arriving]
    assert_arrived(got, previous(), 1, dtype)
    assert_arrived(sent, dist.get_rank(), 1, dtype)
    assert [x.data_ptr() for x in got] == [x.data_ptr() for x in arriving]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 0, 1), (3, 1, 2, 0)], ids=str)
@on_ranks(3)
def test_messages_do_not_overtake(order):
    """Two messages in flight; `order` is that in which their four parts arrive."""
    rank = dist.get_rank()
    arriving = ring_shift(message(rank, 1), group(), "the first")
    arriving += ring_shift(message(rank, 2), group(), "the second")
    for part in order:
        ring_wait(arriving[part], None, "a test")
    assert_arrived(arriving[:2], previous(), 1)
    assert_arrived(arriving[2:], previous(), 2)


@on_ranks(4)
def test_a_ring_of_some_ranks():
    """The ring of a group that is not all ranks: the neighbours are its own."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    name = groups[rank % 2].group_name
    arriving = ring_shift(message(rank, 3), name, "a test")
    got = [ring_wait(x, None, "a test") for x in arriving]
    assert_arrived(got, (rank + 2) % 4, 3)
