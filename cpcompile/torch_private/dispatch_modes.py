"""Hand on the modes that see every call of the dispatcher."""

# How symbolic shapes reach the Python kernels; seen in 2.11 to 2.15.
from torch._dispatch.python import enable_python_dispatcher

# All modes; seen in 2.11 to 2.15.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

__all__ = [
    "TorchDispatchMode",
    "disable_current_modes",
    "enable_python_dispatcher",
]
