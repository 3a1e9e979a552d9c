"""Calls for which DTensor has a handler of its own."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import cpcompile.backend  # noqa: F401  installs the patch
from tests.golden.capture import fake_group


@pytest.mark.parametrize("placement", [Replicate(), Shard(2)])
def test_gradients_of_a_convolution_of_frames_are_sums(placement):
    """Frames are sharded; the gradient comes whole, or by the rows of an image."""
    with fake_group(ranks=2):
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        video = DTensor.from_local(torch.ones(2, 2, 3, 4, 4), mesh, [Shard(1)])
        whole = [Replicate()]
        weight, bias = (
            DTensor.from_local(x, mesh, whole, run_check=False).requires_grad_()
            for x in (torch.ones(5, 3, 2, 2), torch.ones(5))
        )
        y = F.conv2d(video.flatten(0, 1), weight, bias, stride=2)
        assert y.shape == (8, 5, 2, 2)
        rows = 1 if placement == Shard(2) else 2
        local = torch.ones(8, 5, rows, 2)
        gradient = DTensor.from_local(local, mesh, [placement], run_check=False)
        grads = torch.autograd.grad(y, (weight, bias), gradient)
    assert [x.placements for x in grads] == [(Partial(),)] * 2
