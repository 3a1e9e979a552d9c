"""Messages around a real ring arrive, whatever is waited for first; none is left."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import cpcompile.ops  # noqa: F401  registers the operators
from tests.cpu.on_ranks import on_ranks
from tests.cpu.workers import Pool

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


@pytest.mark.parametrize("world", [2, 4])
@on_ranks("world")
def test_around_the_ring(world):
    """What travels around the whole ring comes home."""
    mine = message(dist.get_rank(), 7)
    for step in range(1, world + 1):
        arriving = ring_shift(mine, group(), f"step {step}")
        mine = [ring_wait(x, None, f"step {step}") for x in arriving]
        assert_arrived(mine, previous(step), 7)
    assert_arrived(mine, dist.get_rank(), 7)


@on_ranks(4)
def test_a_ring_of_some_ranks():
    """The ring of a group that is not all ranks: the neighbours are its own."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    name = groups[rank % 2].group_name
    arriving = ring_shift(message(rank, 3), name, "a test")
    got = [ring_wait(x, None, "a test") for x in arriving]
    assert_arrived(got, (rank + 2) % 4, 3)


@on_ranks(2)
def test_torch_can_wait():
    """torch's own wait_tensor waits, too: as a compiled graph does it."""
    arriving = ring_shift(message(dist.get_rank(), 1), group(), "a test")
    got = [torch.ops._c10d_functional.wait_tensor(x) for x in arriving]
    assert_arrived(got, previous(), 1)


@on_ranks(2)
def test_an_error_says_what_it_belongs_to():
    broken = RuntimeError("Connection closed by peer")
    with (
        mock.patch.object(dist, "batch_isend_irecv", side_effect=broken),
        pytest.raises(RuntimeError) as caught,
    ):
        ring_shift([torch.ones(4, 3)], group(), "a test")
    where = f"a test, rank {dist.get_rank()} of 2 in group '0'"
    assert caught.value.__notes__ == [f"cpcompile: this exchange belongs to {where}"]


def check_shift():
    """opcheck, but for what compares results: nobody waits for them there."""
    tensors = message(dist.get_rank(), 1)
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    return torch.library.opcheck(
        ring_shift, (tensors, group(), "a test"), test_utils=utils
    )


def test_opcheck():
    """In processes of their own: what opcheck sends stays in torch's registry.

    A ring of one rank will not do: gloo sends no message to its own rank. cp::ring_wait
    cannot be checked, because it returns its argument, as torch's wait_tensor does.
    """
    pool = Pool(2)
    try:
        for results in pool.run(check_shift):
            assert set(results.values()) == {"SUCCESS"}
    finally:
        pool.close()
