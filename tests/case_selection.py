"""Which tests run without being named: marks that stand beside them say it.

    @pytest.mark.slow                          with --all
    @pytest.mark.ci                            with --ci, as in .ci/run, and --all
    @pytest.mark.core("causal-2", "window")    of its cases only these without --all:
                                               whose id is, or begins with, one
    @pytest.mark.core(every=5)                 the first, the sixth, ... in their order
    @pytest.mark.quick("causal-2", every=5)    the same without --ci and --all

A test without marks runs whole every time. With --all a quarter of the cases outside
the core runs too, another one from day to day; named files run all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest

QUARTER = 4
VARIABLE = "CPCOMPILE_TESTS"


def runs_all() -> bool:
    """Whether --all was given to tools/test."""
    return os.environ.get(VARIABLE) == "all"


def runs_for_ci() -> bool:
    """Whether --ci or --all was given to tools/test."""
    return os.environ.get(VARIABLE) in ("ci", "all")


def cases_outside(kind: str, items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """The cases that the mark of this kind, core or quick, does not name.

    Raises: pytest.UsageError for a name that no case has.
    """
    for cases, mark in _marked(items, kind):
        chosen = core_cases(list(map(_id, cases)), *mark.args, **mark.kwargs)
        yield from (case for case in cases if _id(case) not in chosen)


def _marked(
    items: Sequence[pytest.Item], kind: str
) -> Iterator[tuple[list[pytest.Item], pytest.Mark]]:
    """The cases of each test that has a mark of this kind, and the mark."""
    tests: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker(kind):
            name = getattr(item, "originalname", item.name)
            tests.setdefault((str(item.path), name), []).append(item)
    for (path, name), cases in tests.items():
        mark = cases[0].get_closest_marker(kind)
        assert mark is not None
        ids = [_id(case) for case in cases]
        for unknown in set(mark.args) - {x for x in mark.args if _names(x, ids)}:
            raise pytest.UsageError(
                f"{path}::{name}: {kind} got {unknown!r}; needed the begin of a case's "
                f"id, one of {', '.join(ids[:9])} ..."
            )
        yield cases, mark


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
