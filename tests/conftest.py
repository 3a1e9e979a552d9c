"""The processes that tests share, and which tests a run without names takes.

Named files run whole. Otherwise a budget decides (case_selection).
"""

import gc
import os
from collections.abc import Iterator
from importlib.metadata import version

import pytest

import tests.support.nothing_kept  # noqa: F401  it changes a setting
from tests import case_selection
from tests.case_selection import LANE, VARIABLE, Durations
from tests.cpu.workers import Pools
from tests.support.pairwise import SEED, sample_seed

LINES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """`pools[world].run(fn, *args)` runs fn on `world` ranks."""
    pools = Pools()
    yield pools
    pools.close()


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out what the budget does not cover; deselected, so that it is counted."""
    if config.option.file_or_dir:
        return
    cases = [item.nodeid for item in items]
    durations = Durations.read()
    wish, torch = os.environ.get(VARIABLE, ""), version("torch").partition("+")[0]
    try:
        guards = case_selection.guards()
        chosen = case_selection.selected(cases, durations, guards, wish, torch)
        which = os.environ.get(LANE, "1/1")
        taken = case_selection.lane(sorted(chosen), durations, which)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[LINES] = case_selection.summary(cases, chosen, taken, durations)
    config.hook.pytest_deselected(items=[x for x in items if x.nodeid not in taken])
    items[:] = [item for item in items if item.nodeid in taken]


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Say how long it takes, what should be recorded, and the seed of random cases."""
    seed = [f"sample of cases: {SEED}={sample_seed()}"]
    return config.stash.get(LINES, []) + seed * case_selection.runs_all()


def pytest_collection_finish() -> None:
    """What is imported stays: the garbage collector need not look at it each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the end it looks at all that is left, or libraries report leaks."""
    gc.unfreeze()
