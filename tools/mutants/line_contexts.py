"""A plugin of pytest that notes which lines each test runs, also on its ranks.

    CPCOMPILE_LINES=FOLDER python -m pytest -p line_contexts ...

Needs nothing of tests/, so that it works in any checkout: processes of tests are asked
to run `on_rank`, which they load by the path of this file and which notes lines under
the name of the test that asks. FOLDER gets data of coverage.py, whose contexts are ids
of tests. The file CPCOMPILE_OUTCOMES gets seconds and outcome of each test; without
CPCOMPILE_LINES only that is written.

What is not noted: processes that tests start by themselves; and what a test finds in a
cache or a fixture of its module counts for the test that filled it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

FOLDER = "CPCOMPILE_LINES"
OUTCOMES = "CPCOMPILE_OUTCOMES"
SLOWER = 4  # times, of the limits of requests

_test = ""  # whose lines are noted
_outcomes: dict[str, list[Any]] = {}  # seconds and whether it passed, by test


@functools.cache
def measured() -> coverage.Coverage:
    """Start to note lines in this process."""
    measuring = coverage.Coverage(
        data_file=str(Path(os.environ[FOLDER], "lines")),
        data_suffix=True,
        config_file=False,
        include=[str(Path(x, "*")) for x in ("cpcompile", "passes")],
    )
    measuring.start()
    return measuring


def on_rank(test: str, request: tuple[Any, ...]) -> Any:
    """Run a request in one process of a test."""
    measured().switch_context(test)
    try:
        return _processes().call(*request)
    finally:
        measured().switch_context("")
        measured().save()  # it may be killed


def _processes() -> Any:
    """Return the module that has the processes of tests; checkouts differ in it."""
    workers = importlib.import_module("tests.cpu.workers")
    if hasattr(workers, "serve"):
        return workers
    return importlib.import_module("cpcompile.apps.verification.processes")


def _note_ranks() -> None:
    """Let all sets of processes run `on_rank`, with more time."""
    pool: Any = _processes().Pool
    ask, collect = pool._ask, pool._collect

    def asked(self: Any, fn: Any, args: tuple[Any, ...]) -> None:
        path = inspect.getsourcefile(fn)
        request = (path, fn.__module__, fn.__name__, pickle.dumps(args))
        ask(self, on_rank, (_test, request))

    def collected(self: Any, timeout: float, *more: Any, **named: Any) -> Any:
        return collect(self, SLOWER * timeout, *more, **named)

    pool._ask, pool._collect = asked, collected


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Begin before anything of cpcompile is imported."""
    if os.environ.get(FOLDER):
        measured()
        _note_ranks()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note the lines of one test under its id."""
    global _test
    _test = item.nodeid
    if os.environ.get(FOLDER):
        measured().switch_context(_test)
    try:
        return (yield)
    finally:
        if os.environ.get(FOLDER):
            measured().switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what a test takes, with its fixtures, and whether it passes."""
    outcome = _outcomes.setdefault(report.nodeid, [0.0, True])
    outcome[0] = round(outcome[0] + report.duration, 3)
    outcome[1] = outcome[1] and report.passed


def pytest_collection_finish(session: pytest.Session) -> None:
    """Say which tests would run, if none does."""
    if session.config.option.collectonly:
        _outcomes.update({item.nodeid: [0.0, True] for item in session.items})


def pytest_sessionfinish() -> None:
    """Write what was noted."""
    Path(os.environ[OUTCOMES]).write_text(json.dumps(_outcomes))
    if os.environ.get(FOLDER):
        measured().stop()
        measured().save()
