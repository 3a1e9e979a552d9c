"""All patterns of attention are looked for on two ranks."""

from collections.abc import Iterator

import pytest
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.golden.capture import fake_group
from tests.support.forms.flex_forms import gradients_on_cpu


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Rank 1 of 2."""
    with fake_group(ranks=2), gradients_on_cpu():
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
