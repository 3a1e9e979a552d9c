"""Which cases of a test run every time: its `core` cases, which stand beside it.

    @pytest.mark.core("causal-2", "window")   those whose id is, or begins with, one
    @pytest.mark.core(every=5)                the first, the sixth, ... in their order

A test without this mark runs whole every time. With --all a quarter of the other cases
runs too, another one from day to day; named files run all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

QUARTER = 4


def outside_core(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """The cases that are left out of a run without --all.

    Raises: pytest.UsageError for a name that no case has.
    """
    tests: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("core"):
            name = getattr(item, "originalname", item.name)
            tests.setdefault((str(item.path), name), []).append(item)
    for (path, name), cases in tests.items():
        mark = cases[0].get_closest_marker("core")
        assert mark is not None
        ids = [_id(case) for case in cases]
        chosen = core_cases(ids, *mark.args, **mark.kwargs)
        for unknown in set(mark.args) - {x for x in mark.args if _names(x, ids)}:
            raise pytest.UsageError(
                f"{path}::{name}: core got {unknown!r}; needed the begin of a case's "
                f"id, one of {', '.join(ids[:9])} ..."
            )
        yield from (case for case in cases if _id(case) not in chosen)


def sampled(left_out: Sequence[pytest.Item], seed: int) -> list[pytest.Item]:
    """Those of the cases outside the core that run with --all: a QUARTER of each test.

    With QUARTER successive seeds all of them run.
    """
    return [x for i, x in enumerate(left_out) if (i + seed) % QUARTER == 0]


def core_cases(ids: Sequence[str], *names: str, every: int = 0) -> list[str]:
    """The ids that are named, and each of `every` in their order."""
    named = [x for name in names for x in _names(name, ids)]
    return named + (list(ids[::every]) if every else [])


def _names(name: str, ids: Sequence[str]) -> list[str]:
    return [x for x in ids if x == name or x.startswith(f"{name}-")]


def _id(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return "" if callspec is None else callspec.id
