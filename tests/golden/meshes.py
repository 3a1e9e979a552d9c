"""Fixtures: meshes that exchange nothing."""

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.golden.capture import RANKS, fake_mesh


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    """Rank 1 of a mesh (cp=8).

    A file has another mesh in MESH_AXES, a test as many ranks as an indirect parameter.
    """
    torch.manual_seed(0)
    axes = getattr(request.module, "MESH_AXES", {"cp": RANKS})
    axes = {"cp": request.param} if hasattr(request, "param") else axes
    with fake_mesh(*axes.values(), names=tuple(axes)) as mesh:
        yield mesh


@pytest.fixture
def mesh_2d() -> Iterator[DeviceMesh]:
    """Rank 1 of a mesh (dp=2, cp=4)."""
    torch.manual_seed(0)
    with fake_mesh(2, 4, names=("dp", "cp")) as mesh:
        yield mesh
