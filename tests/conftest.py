"""Which tests a run without names takes: `tools/test --all` and named files take all.

Tests marked `slow` are left out, and of a test with many cases in tests/cpu all but a
few (case_selection).
"""

import gc
import os

import pytest

from tests.case_selection import chosen_items


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out what takes long; deselected, not skipped, so that it is counted."""
    if config.option.file_or_dir or os.environ.get("CPCOMPILE_ALL_TESTS") == "1":
        return
    left_out = {item for item in items if item.get_closest_marker("slow")}
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if "/tests/cpu/" in item.path.as_posix() and item not in left_out:
            name = getattr(item, "originalname", item.name)
            cases.setdefault((str(item.path), name), []).append(item)
    for found in cases.values():
        left_out |= set(found) - set(chosen_items(found))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """What is imported stays: the garbage collector need not look at it each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the end it looks at all that is left, or libraries report leaks."""
    gc.unfreeze()
