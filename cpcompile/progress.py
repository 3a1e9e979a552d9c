"""Say what a compilation that takes long is doing.

    cpcompile: forward has been compiled for 42 s; now: Inductor, backward graph

On a terminal this is one line of standard error that is written anew every second. Else
it is a line of the log, at INFO, each time that the time has doubled.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TextIO

import torch.distributed as dist

log = logging.getLogger("cpcompile")

AFTER_SECONDS = 10.0


class _Compilation:
    """One compilation, and the thread that tells of it."""

    def __init__(self, name: str, after: float, terminal: TextIO | None) -> None:
        self.phase = "begins"
        self._name = name
        self._after = after
        self._terminal = terminal
        self._start = time.monotonic()
        self._done = threading.Event()
        self._written = 0
        self._thread = threading.Thread(
            target=self._tell, name="cpcompile progress", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Write no more lines; end the one on the terminal with the time it took."""
        self._done.set()
        self._thread.join()
        if self._written:
            self._write(f"cpcompile: compiled {self._name} in {self._seconds():.0f} s")
            print(file=self._terminal, flush=True)

    def _tell(self) -> None:
        pause = self._after
        while not self._done.wait(pause):
            text = (
                f"cpcompile: {self._name} has been compiled for "
                f"{self._seconds():.0f} s; now: {self.phase}"
            )
            if self._terminal is None:
                log.info("%s", text)
                pause = self._seconds()
            else:
                self._write(text)
                pause = 1.0

    def _write(self, text: str) -> None:
        """Write a line in the place of the last one."""
        print(f"\r{text:<{self._written}}", end="", file=self._terminal, flush=True)
        self._written = len(text)

    def _seconds(self) -> float:
        return time.monotonic() - self._start


_running: list[_Compilation] = []


@contextmanager
def _told(name: str, after: float) -> Iterator[None]:
    terminal = sys.stderr if sys.stderr.isatty() else None
    _running.append(_Compilation(name, after, terminal))
    try:
        yield
    finally:
        _running.pop().end()


def compiling(name: str, after: float = AFTER_SECONDS) -> AbstractContextManager[None]:
    """Tell of a compilation that takes longer than `after` seconds, on the first rank.

    name: what is compiled. A compilation inside of another one is a part of it.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    return _told(name, after) if first and not _running else nullcontext()


def phase(text: str) -> None:
    """Set what the running compilation does from now on, such as "pass keep_calls"."""
    if _running:
        _running[-1].phase = text
