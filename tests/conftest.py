"""The processes that tests share, and which tests a run without names takes.

Named files take all tests. Otherwise marks decide (case_selection).
"""

import gc
from collections.abc import Iterator

import pytest

import tests.support.nothing_kept  # noqa: F401  it changes a setting
from tests.case_selection import runs_all, sampled, slow_tests
from tests.cpu.workers import Pools
from tests.support.pairwise import SEED, sample_seed


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """`pools[world].run(fn, *args)` runs fn on `world` ranks."""
    pools = Pools()
    yield pools
    pools.close()


def pytest_report_header() -> str | None:
    """The seed of what --all takes of other cases, and of full products."""
    if not runs_all():
        return None
    return f"sample of cases: {SEED}={sample_seed()}"


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out what is slow; deselected, not skipped, so that it is counted."""
    if config.option.file_or_dir:
        return
    left_out: set[pytest.Item] = set()
    for slow in slow_tests(items):
        left_out |= set(slow) - set(sampled(slow, sample_seed()) if runs_all() else ())
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """What is imported stays: the garbage collector need not look at it each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the end it looks at all that is left, or libraries report leaks."""
    gc.unfreeze()
