"""Writes on DTensors are refused where DTensor would compute and drop them."""

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard

from cpcompile.torch_patches.lost_writes import LostWriteError, LostWrites
from tests.golden.capture import fake_mesh

LOST = {
    "slice": lambda x: x[3:9].copy_(torch.ones(6, 4)),
    "augmented slice": lambda x: x[3:9].add_(1.0),
    "row": lambda x: x[3].fill_(0.0),
    "setitem": lambda x: assign(x, slice(0, 5), 2.0),
    "diagonal": lambda x: x.diagonal().zero_(),
    "view of a slice": lambda x: x[3:9].transpose(0, 1)[1:].mul_(2.0),
    "out": lambda x: torch.add(x[0:8], 1.0, out=x[0:8]),
    "part of a list": lambda x: x.split(6)[1].zero_(),
}
KEPT = {
    "whole": lambda x: x.mul_(2.0),
    "columns": lambda x: x[:, :2].copy_(x[:, 2:]),
    "transposed": lambda x: x.transpose(0, 1)[1:].zero_(),
    "copy": lambda x: x[3:9].clone().add_(1.0),
    "flat view": lambda x: x.view(-1).add_(1.0),
}


def assign(x, index, value):
    x[index] = value


@pytest.fixture(params=["real", "fake"])
def sharded(request):
    with fake_mesh(2) as mesh:
        if request.param == "real":
            yield DTensor.from_local(torch.ones(8, 4), mesh, [Shard(0)])
            return
        with FakeTensorMode(), enable_python_dispatcher():
            yield DTensor.from_local(torch.ones(8, 4), mesh, [Shard(0)])


@pytest.mark.parametrize("write", LOST.values(), ids=LOST.keys())
def test_lost_writes_raise(sharded, write):
    for _ in range(2):  # what DTensor remembers makes no difference
        with pytest.raises(LostWriteError, match="it would be lost"), LostWrites():
            write(sharded)


@pytest.mark.parametrize("write", KEPT.values(), ids=KEPT.keys())
def test_other_writes_do_not(sharded, write):
    with LostWrites():
        write(sharded)


def test_replicated_tensors_have_no_parts(sharded):
    whole = sharded.redistribute(placements=[Replicate()])
    with LostWrites():
        whole[3:9].fill_(1.0)
    if not isinstance(whole.to_local(), torch._subclasses.FakeTensor):
        assert whole.to_local()[3:9].eq(1).all()
