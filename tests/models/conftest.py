"""The process sets that the tests of this folder share."""

from collections.abc import Iterator

import pytest

from tests.cpu.workers import Pools


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """`pools[world].run(fn, *args)` runs fn on `world` ranks."""
    pools = Pools()
    yield pools
    pools.close()
