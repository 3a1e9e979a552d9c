"""Have Python look for garbage less often while a graph is compiled."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_OBJECTS = 50_000  # new objects before Python looks; its own number is 700


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Have Python look for garbage less often inside of the block; may be nested.

    A compilation makes millions of objects, and most of them live as long as it does.
    So Python looks through the same graphs again and again: 7 % of the time.
    """
    before = gc.get_threshold()
    if before[0]:  # 0: the user looks himself
        gc.set_threshold(max(before[0], _OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
