"""Has Python look for garbage less often while a graph is compiled."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_OBJECTS = 50_000  # that are new before Python looks; its own number is 700


@contextmanager
def collected_rarely() -> Iterator[None]:
    """For the time of one compilation; may be nested.

    A compilation makes millions of objects, most of which live as long as it does, so
    that Python looks through the same graphs again and again: 7 % of the time.
    """
    before = gc.get_threshold()
    if before[0]:  # 0: the user looks himself
        gc.set_threshold(max(before[0], _OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
