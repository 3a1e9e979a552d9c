"""The process sets that the tests of this folder share, and how many cases run.

Each case starts programs on several processes. So of a test with many cases a whole run
takes a fixed quarter; `tools/test --all`, and a run of named files, take them all.
"""

import os
import zlib
from collections.abc import Iterator

import pytest

from tests.cpu.workers import Pools


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """`pools[world].run(fn, *args)` runs fn on `world` ranks."""
    pools = Pools()
    yield pools
    pools.close()


FEW = 4  # cases of one test that run in any case


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out three of four cases of tests with many."""
    named = any(not x.startswith("-") for x in config.invocation_params.args)
    if named or os.environ.get("CPCOMPILE_ALL_TESTS") == "1":
        return
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if "/tests/cpu/" in item.path.as_posix():
            name = getattr(item, "originalname", item.name)
            cases.setdefault((str(item.path), name), []).append(item)
    left_out = {
        item
        for found in cases.values()
        for item in sorted(found, key=_number)[max(FEW, len(found) // 4) :]
    }
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _number(item: pytest.Item) -> int:
    """The same in every run, and nothing to do with what a case is."""
    return zlib.crc32(item.name.encode())
