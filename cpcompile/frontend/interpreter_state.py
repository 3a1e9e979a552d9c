"""Have CPython spend less time on frames and garbage while a graph is compiled.

CPython (3.11 and later) keeps frames in pieces of 16 KiB, which it maps when a call
needs the next one and unmaps when that call returns. A compilation runs about a hundred
frames deep, and a loop that happens to stand at the end of a piece maps and unmaps one
in each call: Inductor's pattern matcher was five to twenty times slower there, with
more time in the kernel than in Python. A frame that does not fit gets a piece as large
as it needs, a power of two. What is left of the piece is for the frames after it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_SLOTS = 1 << 17  # slots of 8 bytes; half of the piece of 2 MiB is left
_OBJECTS = 50_000  # new objects before Python looks; its own number is 700


def with_large_stack(function: Callable[[], T]) -> T:
    """Call `function` in a large piece, and return its result; may be nested."""
    return function()


with_large_stack.__code__ = with_large_stack.__code__.replace(co_stacksize=_SLOTS)


@contextmanager
def gc_paused() -> Iterator[None]:
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
