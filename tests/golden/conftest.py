"""Fake process groups: this process is one rank of eight, and nothing is exchanged."""

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cpcompile import refusals
from tests.golden.capture import RANKS, fake_group, shared_groups


@pytest.fixture(autouse=True)
def no_mistakes() -> Iterator[None]:
    """Attempts of the passes end with a result or a refusal.

    Mistakes are raised, too, but what raises may be caught by another attempt.
    """
    counters["cpcompile"][refusals.COUNTER] = 0
    yield
    assert counters["cpcompile"][refusals.COUNTER] == 0, "a mistake had a fallback"


@pytest.fixture(autouse=True, scope="module")
def groups_of_a_file() -> Iterator[None]:
    """The tests of a file that need the same group share it."""
    with shared_groups():
        yield


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    """Rank 1 of a mesh (cp=8).

    A file has another number of ranks in MESH_RANKS, a test in an indirect parameter.
    """
    torch.manual_seed(0)
    ranks = getattr(request, "param", getattr(request.module, "MESH_RANKS", RANKS))
    with fake_group(ranks=ranks):
        yield init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))


@pytest.fixture
def mesh_2d() -> Iterator[DeviceMesh]:
    """Rank 1 of a mesh (dp=2, cp=4)."""
    torch.manual_seed(0)
    with fake_group():
        yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "cp"))
