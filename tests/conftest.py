"""The processes that tests share, and which tests a run without names takes.

`tools/test --all` and named files take all. Otherwise tests marked `slow` are left out,
and of one marked `core` all other cases (case_selection).
"""

import gc
import os
from collections.abc import Iterator

import pytest

from tests.case_selection import outside_core
from tests.cpu.workers import Pools
from tests.support.pairwise import SEED, sample_seed


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """`pools[world].run(fn, *args)` runs fn on `world` ranks."""
    pools = Pools()
    yield pools
    pools.close()


def pytest_report_header() -> str | None:
    """The seed of the sample that --all takes of full products."""
    if os.environ.get("CPCOMPILE_ALL_TESTS") != "1":
        return None
    return f"sample of full products: {SEED}={sample_seed()}"


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out what takes long; deselected, not skipped, so that it is counted."""
    if config.option.file_or_dir or os.environ.get("CPCOMPILE_ALL_TESTS") == "1":
        return
    left_out = {item for item in items if item.get_closest_marker("slow")}
    left_out |= set(outside_core(items))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """What is imported stays: the garbage collector need not look at it each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the end it looks at all that is left, or libraries report leaks."""
    gc.unfreeze()
