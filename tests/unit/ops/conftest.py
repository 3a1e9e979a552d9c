"""Meshes that exchange nothing."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


def _fake(cp: int) -> Iterator[DeviceMesh]:
    store = FakeStore()
    dist.init_process_group("fake", store=store, rank=1, world_size=2 * cp)
    yield init_device_mesh("cpu", (2, cp), mesh_dim_names=("dp", "cp"))
    dist.destroy_process_group()


@pytest.fixture
def fake_mesh() -> Iterator[DeviceMesh]:
    """Rank 1 of a mesh (dp=2, cp=2)."""
    yield from _fake(2)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Rank 1 of a mesh (dp=2, cp=4)."""
    yield from _fake(4)
