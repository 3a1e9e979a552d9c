"""Hand on fake tensors: values with a shape and without data."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# Seen in 2.11 to 2.15.
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, is_fake

# Where a fake call that fails is logged with its traceback, before it raises; seen in
# 2.13.
_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def failing_quietly() -> Iterator[None]:
    """Log no error of a fake call: whoever tries the call takes it for an answer."""
    _LOG.addFilter(_has_no_error)
    try:
        yield
    finally:
        _LOG.removeFilter(_has_no_error)


def _has_no_error(record: logging.LogRecord) -> bool:
    return not record.exc_info


__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "detect_fake_mode",
    "failing_quietly",
    "is_fake",
]
