"""Which tests a run without names takes: `tools/test --all` and named files take all.

Tests marked `slow` are left out. The cases of tests/cpu start programs on several
processes, so that of a test with many cases a fixed quarter runs.
"""

import os
import zlib

import pytest

FEW = 4  # cases of one test in tests/cpu that run in any case


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out what takes long; deselected, not skipped, so that it is counted."""
    named = any(not x.startswith("-") for x in config.invocation_params.args)
    if named or os.environ.get("CPCOMPILE_ALL_TESTS") == "1":
        return
    left_out = {item for item in items if item.get_closest_marker("slow")}
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if "/tests/cpu/" in item.path.as_posix() and item not in left_out:
            name = getattr(item, "originalname", item.name)
            cases.setdefault((str(item.path), name), []).append(item)
    for found in cases.values():
        left_out |= set(sorted(found, key=_number)[max(FEW, len(found) // 4) :])
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _number(item: pytest.Item) -> int:
    """The same in every run, and nothing to do with what a case is."""
    return zlib.crc32(item.name.encode())
