"""Meshes that exchange nothing."""

from collections.abc import Iterator

import pytest
from torch.distributed.device_mesh import DeviceMesh

from tests.golden.capture import fake_mesh as fake_mesh_of
from tests.golden.meshes import mesh_2d as mesh  # noqa: F401  (a fixture)


@pytest.fixture
def fake_mesh() -> Iterator[DeviceMesh]:
    """Rank 1 of a mesh (dp=2, cp=2)."""
    with fake_mesh_of(2, 2, names=("dp", "cp")) as made:
        yield made
