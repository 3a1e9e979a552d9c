"""Show how far a verification is: a bar on a terminal, lines elsewhere, or nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Tick = Callable[[str], None]
"""A function to call with what begins now."""


@contextmanager
def progress(total: int, shown: bool) -> Iterator[Tick]:
    """Yield a function to call at the beginning of each of `total` parts.

    With rich, which the extra "demo" brings, a terminal shows a bar.
    """
    if not shown:
        yield lambda what: None
        return
    bar = _bar(total) if sys.stderr.isatty() else None
    if bar is None:
        yield _lines(total)
        return
    with bar as tick:
        yield tick


def _lines(total: int) -> Tick:
    done = 0

    def tick(what: str) -> None:
        nonlocal done
        done += 1
        print(f"[{done}/{max(done, total)}] {what}", file=sys.stderr, flush=True)

    return tick


def _bar(total: int) -> Any:
    try:
        from rich import console  # optional
        from rich import progress as bars
    except ImportError:
        return None

    @contextmanager
    def shown() -> Iterator[Tick]:
        columns = (bars.BarColumn(), bars.TextColumn("{task.description}"))
        where = console.Console(stderr=True)
        with bars.Progress(*columns, console=where, transient=True) as bar:
            task = bar.add_task("", total=total)
            begun = 0

            def tick(what: str) -> None:
                nonlocal begun
                bar.update(task, completed=begun, description=what)
                begun += 1

            yield tick

    return shown()
