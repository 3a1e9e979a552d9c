"""Hand on fake tensors, the modes that see every call, and the symbols of sizes."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# How symbolic shapes reach the Python kernels; seen in 2.11 to 2.15.
from torch._dispatch.python import enable_python_dispatcher

# Values with a shape and without data; seen in 2.11 to 2.15.
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, is_fake

# All modes; seen in 2.11 to 2.15. Tensors of a class with parts; seen in 2.13.
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
)
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

# Functions of sizes; seen in 2.11 to 2.15.
from torch.utils._sympy.functions import Max, Mod

# Symbols of numbers and of sizes; seen in 2.11 to 2.15.
from torch.utils._sympy.symbol import SymT, symbol_is_type

# What a thread dispatches to, outside of operators and modes; seen in 2.11 to 2.15.
_INCLUDED = torch._C._dispatch_tls_local_include_set()
_EXCLUDED = torch._C._dispatch_tls_local_exclude_set()


@contextmanager
def outside_of_operators() -> Iterator[None]:
    """Dispatch as outside of an operator, in which autograd is left out."""
    with torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED):
        yield


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
