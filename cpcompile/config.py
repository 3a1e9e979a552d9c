"""Process-wide settings, `cpcompile.config`; what differs per call is an option.

    cpcompile.config.agreement_timeout_seconds = 120
    with cpcompile.config.patch(tie_fraction=0.0): ...

An unknown name raises AttributeError.
"""

import sys
from typing import TYPE_CHECKING, Any, Literal

from torch.utils._config_module import install_config_module

# How long a rank waits at compile time for the others to compile the same graph.
agreement_timeout_seconds: float = 120.0

# Two strategies whose predicted times differ by less than this are a tie, which
# the smaller memory, then the smaller number of kernels, decides.
tie_fraction: float = 0.05

# The strategy of attention on DTensors outside of a compiled graph.
eager_strategy: Literal["ring", "all_gather"] = "ring"

if TYPE_CHECKING:

    def patch(**changes: Any) -> Any: ...


install_config_module(sys.modules[__name__])
