"""Operands without a gradient after a redistribution."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

import cpcompile.backend  # noqa: F401  installs the patch
from cpcompile.passes.placement.edge_gradients import (
    PinnedGradient,
    UnreducedGradient,
)
from tests.golden.capture import fake_group


class FirstAlone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@pytest.fixture
def mesh():
    with fake_group(ranks=2):
        yield torch.distributed.init_device_mesh("cpu", (2,))


def test_redistribution(mesh):
    x, y = (torch.ones(4, requires_grad=True) for _ in range(2))
    parts = [DTensor.from_local(t, mesh, [Shard(0)]) for t in (x, y)]
    FirstAlone.apply(*(p.full_tensor() for p in parts)).sum().backward()
    assert x.grad is not None and y.grad is None


def test_pinned_and_unreduced_gradients(mesh):
    x, y = (torch.ones(4, requires_grad=True) for _ in range(2))
    whole = (Replicate(),)
    first = DTensor.from_local(x, mesh, whole)
    pinned = PinnedGradient.apply(DTensor.from_local(y, mesh, whole), False)
    FirstAlone.apply(first, pinned).sum().backward()
    second = UnreducedGradient.apply(y, mesh, whole, (0,), 1, None)
    FirstAlone.apply(DTensor.from_local(x, mesh, whole), second).sum().backward()
    assert x.grad is not None and y.grad is None
