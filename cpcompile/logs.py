"""Warnings that appear once, whatever number of calls runs into their cause."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("cpcompile")


class _Warnings:
    """The warnings that this process has met, as a function that is called with one."""

    def __init__(self) -> None:
        self._met: list[str] = []
        self._is_collecting = False

    def __call__(self, message: str) -> None:
        """Log `message` at warning level the first time this process meets it."""
        if message not in self._met:
            self._met.append(message)
            if not self._is_collecting:
                log.warning("%s", message)

    def mentions(self, text: str) -> bool:
        """Tell whether a warning that was met has this text in it."""
        return any(text in message for message in self._met)

    def cache_clear(self) -> None:
        """Start anew, as in another process."""
        self._met.clear()

    @contextmanager
    def collected(self) -> Iterator[list[str]]:
        """Collect what is warned of inside of the block, as a process of its own.

        Nothing is logged, and what was met before or inside counts only there.
        """
        before = self._met, self._is_collecting
        self._met, self._is_collecting = [], True
        try:
            yield self._met
        finally:
            self._met, self._is_collecting = before


warn_once = _Warnings()


def warn_unsharded(place: str, why: object) -> None:
    """Warn once that every rank does all of the work of a place.

    why: the reason, and the way out.
    """
    warn_once(f"{place} runs unsharded, with all of its work on every rank: {why}")


def warn_unmet(place: str, option: str, why: str) -> None:
    """Warn once that what the user asked for is not done somewhere."""
    warn_once(f"{place}: {option} is not met: {why}")


def warn_of_order(place: str, layouts: list[str], fix: str) -> None:
    """Warn once that results are wrong if a DTensor came from a balanced layout."""
    warn_once(
        f"{place} takes tokens in order, and cp.shard made some in layout {layouts}: "
        f"results that come from those are wrong; {fix}"
    )
