"""Shifts and waits without a network, and clocks of rings."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import cpcompile.ops  # noqa: F401  registers the operators
from tests.golden.capture import fake_group
from tools.bench.layouts import ring_clock as clock


def test_a_rank_goes_on_when_its_message_was_sent():
    # Rank 1 works for 2 s before it sends, and rank 0 for 1 s after it received.
    slow = [("work", 2.0), ("send", 0), ("receive", 0), ("work", 0.5)]
    fast = [("work", 0.1), ("send", 0), ("receive", 0), ("work", 1.0)]
    assert clock.replay([fast, slow]) == 3.0
    assert clock.replay([slow, slow]) == 2.5
    assert clock.replay([[("work", 3.0)]]) == 3.0
    waits = [("receive", 0), ("send", 0)]
    with pytest.raises(ValueError, match="ranks wait for each other after"):
        clock.replay([waits, waits])


ring_shift = torch.ops.cp.ring_shift.default
ring_wait = torch.ops.cp.ring_wait.default


def test_fakes():
    """What arrives has the shape and dtype of what is sent, and is contiguous."""
    with FakeTensorMode():
        sent = [torch.empty(2, 4, 3), torch.empty(5, 2, dtype=torch.bfloat16).t()]
        arriving = ring_shift(sent, "no group is needed", "a test")
        got = [ring_wait(x, sent[0], "a test") for x in arriving]
    for results in (arriving, got):
        for x, y in zip(results, sent, strict=True):
            assert (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
            assert x.is_contiguous()


def test_traced_in_order():
    """Nothing is dropped but what nobody uses, and a wait keeps what comes before."""

    def exchange(x, y):
        arriving = ring_shift([x], "a group", "a test")
        z = y + 1
        return ring_wait(arriving[0], z, "a test")

    with FakeTensorMode():
        traced = make_fx(exchange)(torch.empty(3), torch.empty(3))
    calls = [n for n in traced.graph.nodes if n.op == "call_function"]
    names = [str(node.target) for node in calls if "getitem" not in str(node.target)]
    assert names == ["cp.ring_shift.default", "aten.add.Tensor", "cp.ring_wait.default"]


@pytest.mark.parametrize("after", [None, torch.ones(2)])
def test_a_wait_returns_what_it_is_given(after):
    """Also for a tensor that no message is under way for."""
    x = torch.ones(3)
    got = ring_wait(x, after, "a test")
    assert got.data_ptr() == x.data_ptr()
    assert torch.equal(got, torch.ones(3))


def test_the_neighbours(monkeypatch):
    """Rank 2 of 4 sends to 3 and receives from 1, in the order of the list."""
    sent, received = [], []
    original = dist.batch_isend_irecv

    def batch(operations):
        for operation in operations:
            kind = {dist.isend: sent, dist.irecv: received}[operation.op]
            kind.append((operation.tensor.shape[0], operation.peer))
        return original(operations)

    monkeypatch.setattr(dist, "batch_isend_irecv", batch)
    with fake_group(2, 4):
        tensors = [torch.ones(3), torch.ones(5)]
        arriving = ring_shift(tensors, dist.group.WORLD.group_name, "a test")
        for x in arriving:
            ring_wait(x, None, "a test")
    assert sent == [(3, 3), (5, 3)]
    assert received == [(3, 1), (5, 1)]
