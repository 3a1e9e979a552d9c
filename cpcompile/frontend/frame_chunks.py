"""Run a function where Python has room for all frames of the calls inside of it.

CPython (3.11 and later) keeps frames in pieces of 16 KiB, which it maps when a call
needs the next one and unmaps when that call returns. A compilation runs about a hundred
frames deep, and a loop that happens to stand at the end of a piece maps and unmaps one
in each call: Inductor's pattern matcher was five to twenty times slower there, with
more time in the kernel than in Python. A frame that does not fit gets a piece as large
as it needs, a power of two. What is left of the piece is for the frames after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_SLOTS = 1 << 17  # slots of 8 bytes; half of the piece of 2 MiB is left


def run_with_room(function: Callable[[], T]) -> T:
    """Call `function` in a large piece, and return its result; may be nested."""
    return function()


run_with_room.__code__ = run_with_room.__code__.replace(co_stacksize=_SLOTS)
