"""All patterns of attention are looked for on two ranks."""

from collections.abc import Iterator

import pytest
from torch.distributed.device_mesh import DeviceMesh

from tests.golden.capture import fake_mesh
from tests.support.forms.flex_forms import gradients_on_cpu


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Rank 1 of 2."""
    with fake_mesh(2) as mesh, gradients_on_cpu():
        yield mesh
