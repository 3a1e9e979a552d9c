"""What tests of shards share."""

import pytest
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@pytest.fixture
def one_rank(one_rank: str) -> DeviceMesh:
    """A real group of one rank."""
    return init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
