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
# fewer kernels decide where memory is plentiful, and less memory elsewhere.
tie_fraction: float = 0.05

# What the cost model knows of the machine: the name of a profile that ships with
# cpcompile, such as "h100", the path of a .json file, or "auto": what `cpcompile
# calibrate` has measured here, else the shipped profile that fits the device's name.
# The setting of rank 0 counts for all ranks.
hardware: str = "auto"

# The strategy of attention on DTensors outside of a compiled graph.
eager_strategy: Literal["ring", "all_gather"] = "ring"

# The kernel of attention steps: our Triton templates, aten's flash attention or matrix
# products. "auto" is triton on GPUs and aten_flash on CPUs, where they can do the call.
step_kernel: Literal["auto", "triton", "aten_flash", "aten_math"] = "auto"

# Prove in the generated code that every message of a ring is sent before the step that
# hides it and waited for after it, or raise RingOverlapError. For rings that are
# unrolled in a graph that Inductor compiles.
check_overlap: bool = False

# How many megabytes of gradients are sent together while the backward goes on. This is
# for gradients that are summed over the ranks in a graph that Inductor compiles, for
# parameters that cp.shard_parameters has sharded, and for their gradients. None: 1/16
# of what a graph learns, but 1 to 25 MB; 0: one by one. Larger buckets are sent later:
# no computation hides the last one, nor the first one of sharded parameters.
gradient_bucket_megabytes: float | None = None

# What the values of one tile may take at a time, where options["tile"] is "auto". None
# is 64 MiB on a CPU, and 1/128 of its memory on an accelerator.
tile_megabytes: float | None = None

# A region runs in tiles if one of its values is at least this large on a rank.
tile_least_megabytes: float = 16.0

# A mask that cannot be read as a function of positions is computed in whole on every
# rank while it takes at most this share of what a rank holds of q, k, v and the result
# of its attention call, or 16 MiB. A larger one is computed by rows where that can be
# proved, and else in whole, with a warning.
whole_mask_share: float = 1.0

if TYPE_CHECKING:

    def patch(**changes: Any) -> Any: ...


install_config_module(sys.modules[__name__])
