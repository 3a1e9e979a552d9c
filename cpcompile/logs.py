"""Warnings that appear once, whatever number of calls runs into their cause."""

from __future__ import annotations

import functools
import logging

log = logging.getLogger("cpcompile")


@functools.cache
def warn_once(message: str) -> None:
    """Log `message` at warning level the first time this process meets it."""
    log.warning("%s", message)
