"""Measure the resident memory of this process, and its peak."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGE = 2**20
_LARGEST_KEPT = 2**25  # DEFAULT_MMAP_THRESHOLD_MAX of glibc's malloc.c


def give_back_freed_blocks() -> None:
    """Give blocks of 1 MiB or more back to the system when they are freed, from now on.

    Call it before large blocks have been made: for a block of any size malloc takes a
    freed part of its heap rather than memory of its own.
    """
    _set(_M_MMAP_THRESHOLD, _LARGE)


def keep_freed_blocks() -> None:
    """Keep freed blocks as malloc does by default, once it has freed 32 MiB blocks."""
    _set(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
    _set(_M_TRIM_THRESHOLD, 2 * _LARGEST_KEPT)


def _set(parameter: int, size: int) -> None:
    assert ctypes.CDLL("libc.so.6").mallopt(parameter, size) == 1, "glibc refuses it"


def reset_peak() -> int:
    """Begin to measure; return the bytes that are resident."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """Return the most bytes that were resident since reset_peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [x for x in lines if x.startswith("VmHWM")]
    return int(line.split()[1]) * 1024
