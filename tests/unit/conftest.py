"""What several tests of operators share."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import settings

from tests.golden.meshes import mesh  # noqa: F401  (a fixture)
from tests.unit.ranks.talking_ranks import talk  # noqa: F401  (a fixture)

# A busy machine is not a slow program.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture
def one_rank() -> Iterator[str]:
    """The name of a real group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()
