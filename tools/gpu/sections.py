"""Run a section of the GPU report: its items, in processes of their own, in its time.

Items come most important first; a process takes the next one as soon as it is free.
Whatever happens to an item is a row: what it measured, an exception, a lost CUDA
context, a crash or no answer at all. A process that is lost is replaced. Items that no
longer fit are returned, so that the report can name them.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any, Protocol

import torch

ITEM_SECONDS = 150.0  # an item that takes longer hangs
GRACE_SECONDS = 15.0  # for what is under way when the time is up
MOST_DEATHS = 6  # processes that end by themselves, one after the other

Row = dict[str, Any]  # what JSON can hold


@dataclass(frozen=True)
class Mode:
    """How much of the report is wanted, and where.

    smoke: tiny sizes on the CPU in Triton's interpreter, all in this process.
    quick: only the most important items.
    """

    device: str = "cuda"
    smoke: bool = False
    quick: bool = False


class Item(Protocol):
    """One unit of work; can be pickled, and str() says what it is."""

    def run(self, mode: Mode) -> list[Row]:
        """Return what was measured; an error of one of several things is in its row."""


@dataclass(frozen=True)
class Section:
    """Part of the report.

    seconds: what it is expected to take; its share of the time that is left.
    workers: processes at a time; 1 where times are taken.
    environment: variables of its processes.
    """

    key: str
    title: str
    seconds: float
    workers: int
    plan: Callable[[Mode], Sequence[Item]]
    environment: Mapping[str, str] = field(default_factory=dict)


def run_section(
    section: Section, mode: Mode, seconds: float, take: Callable[[Row], None]
) -> list[str]:
    """Hand every row to `take` as it comes; return the items that were not run."""
    deadline = time.monotonic() + seconds
    pending = deque(section.plan(mode))
    if mode.smoke:
        while pending and time.monotonic() < deadline:
            item = pending.popleft()
            _take_all(take, item, *_attempt(item, mode))
    else:
        with _environment(section.environment):
            _in_processes(section, mode, pending, deadline, take)
    return [str(item) for item in pending]


def _take_all(
    take: Callable[[Row], None], item: Item, rows: list[Row], error: str | None
) -> None:
    for row in rows:
        take({"item": str(item), **row})
    if error is not None:
        take({"item": str(item), "error": error})


def _attempt(item: Item, mode: Mode) -> tuple[list[Row], str | None]:
    try:
        return item.run(mode), None
    except Exception:  # whatever it is, it is part of the report
        return [], traceback.format_exc()


class _Worker:
    """A process that runs items, one at a time."""

    def __init__(self, mode: Mode) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.connection, theirs = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(theirs, mode), daemon=True)
        self.process.start()
        theirs.close()
        self.item: Item | None = None
        self.limit = 0.0

    def give(self, item: Item, limit: float) -> None:
        self.item, self.limit = item, limit
        with contextlib.suppress(OSError):  # a process that ended: its answer says so
            self.connection.send(item)

    def answer(self) -> tuple[list[Row], str | None, bool]:
        """Receive rows, error, and whether the process goes on."""
        try:
            rows, error, works = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(5)
            code = self.process.exitcode
            return [], f"the process ended with exit code {code}", False
        return rows, error, works

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _in_processes(
    section: Section,
    mode: Mode,
    pending: deque[Item],
    deadline: float,
    take: Callable[[Row], None],
) -> None:
    workers: list[_Worker] = []
    deaths = 0

    def next_limit() -> float:
        return min(time.monotonic() + ITEM_SECONDS, deadline + GRACE_SECONDS)

    try:
        while True:
            may_start = time.monotonic() < deadline and deaths < MOST_DEATHS
            idle = [w for w in workers if w.item is None]
            while pending and may_start:
                if not idle and len(workers) < section.workers:
                    workers.append(_Worker(mode))
                    idle.append(workers[-1])
                if not idle:
                    break
                idle.pop().give(pending.popleft(), next_limit())
            busy = [w for w in workers if w.item is not None]
            if not busy:
                return
            patience = max(min(w.limit for w in busy) - time.monotonic(), 0.0)
            ready = connection.wait([w.connection for w in busy], patience)
            for worker in busy:
                item = worker.item
                assert item is not None
                if worker.connection in ready:
                    rows, error, works = worker.answer()
                    worker.item = None
                elif time.monotonic() >= worker.limit:
                    rows, works = [], False
                    error = "no result when its time was up; the process was ended"
                else:
                    continue
                _take_all(take, item, rows, error)
                if works:
                    deaths = 0
                else:
                    deaths += worker.item is None  # by itself
                    worker.end()
                    workers.remove(worker)
    finally:
        for worker in workers:
            worker.end()


def serve(link: connection.Connection, mode: Mode) -> None:
    """Run items until the parent is gone: the main function of a process."""
    torch.set_num_threads(1)
    while True:
        try:
            item = link.recv()
        except EOFError:
            return
        rows, error = _attempt(item, mode)
        works = True
        try:
            gc.collect()
            if mode.device == "cuda":
                torch.cuda.synchronize()  # raises for all errors of earlier kernels
                torch.cuda.empty_cache()
        except RuntimeError as lost:
            error = f"{error or ''}\nThe CUDA context is lost: {lost}".strip()
            works = False
        link.send((rows, error, works))
        if not works:
            return


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Give these variables to processes that are started inside."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
