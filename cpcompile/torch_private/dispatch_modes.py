"""Hand on the modes that see every call of the dispatcher, and what it leaves out."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# How symbolic shapes reach the Python kernels; seen in 2.11 to 2.15.
from torch._dispatch.python import enable_python_dispatcher

# All modes; seen in 2.11 to 2.15. Tensors of a class with parts; seen in 2.13.
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
)
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

# What a thread dispatches to, outside of operators and modes; seen in 2.11 to 2.15.
_INCLUDED = torch._C._dispatch_tls_local_include_set()
_EXCLUDED = torch._C._dispatch_tls_local_exclude_set()


@contextmanager
def outside_of_operators() -> Iterator[None]:
    """Dispatch as outside of an operator, in which autograd is left out."""
    with torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED):
        yield


__all__ = [
    "TorchDispatchMode",
    "disable_current_modes",
    "enable_python_dispatcher",
    "is_traceable_wrapper_subclass",
    "outside_of_operators",
]
