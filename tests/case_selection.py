"""Which tests run without being named: the mark `slow` says it.

    @pytest.mark.slow                          with --all
    @pytest.mark.slow(but=["causal-2"])        with --all, but for the cases whose id is
                                               one of these, or begins with one
    @pytest.mark.slow(but_every=5)             but for the first, the sixth, ... case

A test without the mark runs whole every time. With --all one of 24 slow cases of a test
runs, and at least one; others from day to day. Named files run all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest

DAYS = 24  # in which --all runs every slow case
VARIABLE = "CPCOMPILE_TESTS"


def runs_all() -> bool:
    """Tell whether --all was given to tools/test."""
    return os.environ.get(VARIABLE) == "all"


def slow_tests(items: Sequence[pytest.Item]) -> Iterator[list[pytest.Item]]:
    """Yield the slow cases of every test that has some.

    Raises: pytest.UsageError for a name that no case has.
    """
    tests: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        name = getattr(item, "originalname", item.name)
        tests.setdefault((str(item.path), name), []).append(item)
    for (path, name), cases in tests.items():
        ids = [_id(case) for case in cases]
        slow = []
        for case in cases:
            marks = list(case.iter_markers("slow"))
            for mark in marks:
                for unknown in mark.kwargs.get("but", ()):
                    if not _named(unknown, ids):
                        raise pytest.UsageError(
                            f"{path}::{name}: slow got but={unknown!r}; needed the "
                            f"begin of a case's id, one of {', '.join(ids[:9])} ..."
                        )
            if any(_id(case) not in chosen_cases(ids, **m.kwargs) for m in marks):
                slow.append(case)
        if slow:
            yield slow


def sampled(slow: Sequence[pytest.Item], seed: int) -> list[pytest.Item]:
    """Choose the slow cases of one test that --all runs.

    With DAYS successive seeds all of them run.
    """
    step = min(DAYS, len(slow))
    return [x for i, x in enumerate(slow) if (i + seed) % step == 0]


def chosen_cases(
    ids: Sequence[str], but: Sequence[str] = (), but_every: int = 0
) -> set[str]:
    """Return the ids that are named, and each of `but_every` in their order."""
    named = {x for name in but for x in _named(name, ids)}
    return named | set(ids[::but_every] if but_every else [])


def _named(name: str, ids: Sequence[str]) -> list[str]:
    return [x for x in ids if x == name or x.startswith(f"{name}-")]


def _id(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return "" if callspec is None else callspec.id
