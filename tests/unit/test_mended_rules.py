"""Rules of DTensor that cpcompile mends when it is imported."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

import cpcompile.backend  # noqa: F401  mends them
from tests.golden.capture import fake_group


@pytest.fixture
def mesh():
    with fake_group(ranks=2):
        yield torch.distributed.init_device_mesh("cpu", (2,))


def test_every_topk_has_its_own_columns(mesh):
    x = DTensor.from_local(torch.randn(4, 8), mesh, [Shard(0)], run_check=False)
    for k in (2, 1, 3):
        assert [tuple(y.shape) for y in x.topk(k)] == [(8, k)] * 2


def test_every_histogram_has_its_own_bins(mesh):
    x = DTensor.from_local(torch.randn(8), mesh, [Replicate()], run_check=False)
    assert [x.histc(bins, -1, 1).shape[0] for bins in (4, 6)] == [4, 6]


@pytest.mark.parametrize("scan", [torch.cumsum, torch.cumprod, torch.logcumsumexp])
def test_a_scan_from_the_end_is_not_done_on_parts(mesh, scan):
    x = DTensor.from_local(torch.randn(2, 4, 8), mesh, [Shard(1)], run_check=False)
    assert scan(x, -2).placements == scan(x, 1).placements == (Replicate(),)
    assert scan(x, -1).placements == (Shard(1),)
