"""Hold the settings, `cpcompile.config`, which tune and watch programs.

    cpcompile.config.agreement_timeout_seconds = 300
    with cpcompile.config.patch(unroll=0): ...

What a program means is an option. An unknown name raises AttributeError. "auto" and
None mean the same: it is left to cpcompile. A program keeps the settings under which it
was compiled, which is in its first call.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

# It reads the module that calls it; seen in 2.13.
from torch.utils._config_module import install_config_module

Auto = Literal["auto"] | None

# How long a rank waits at compile time for the others to compile the same graph.
agreement_timeout_seconds: float = 120.0

# Two strategies whose predicted times differ by less than this are a tie, which
# fewer kernels decide where memory is plentiful, and less memory elsewhere.
tie_fraction: float = 0.05

# What the cost model knows of the machine: the name of a profile that ships with
# cpcompile, such as "h100", the path of a .json file, or "auto": what `cpcompile
# calibrate` has measured here, else the shipped profile that fits the device's name.
# The setting of rank 0 counts for all ranks.
hardware: str | None = "auto"

# The strategy of attention on DTensors outside of a compiled graph.
eager_strategy: str = "ring"

# The kernel of attention steps: our Triton templates, aten's flash attention or matrix
# products. "auto" is triton on GPUs and aten_flash on CPUs, where they can do the call.
step_kernel: str | None = "auto"

# Rings of up to this many ranks become steps in the graph, which Inductor compiles;
# larger ones run their steps in a loop. "auto" is a limit on the steps of a graph, so
# that the compile time is limited too.
unroll: int | Auto = "auto"

# Extra bytes per rank that an attention call may take. "auto" is what the device has.
memory_budget: int | Auto = "auto"

# In which calls all values are compared with the other ranks' values: n for the first
# call and every n-th call, "first" for the first call alone. "auto" is the rule of
# rank_check; 0 compares neither values nor calls.
check_ranks: int | Literal["first"] | Auto = "auto"

# The path of a trace of all ranks for Perfetto, of the third step; None for no trace.
profile: str | None = None

# Prove in the generated code that every message of a ring is sent before the step that
# hides it and waited for after it, or raise RingOverlapError. For rings that are
# unrolled in a graph that Inductor compiles.
check_overlap: bool = False

# How many megabytes of gradients are sent together while the backward goes on. This is
# for gradients that are summed over the ranks in a graph that Inductor compiles, for
# parameters that cp.shard_parameters has sharded, and for their gradients. "auto":
# 1/16 of what a graph learns, but 1 to 25 MB; 0: one by one. Larger buckets are sent
# later: no computation hides the last one, nor the first one of sharded parameters.
gradient_bucket_megabytes: float | Auto = "auto"

# What the values of one tile may take at a time, where options["tile"] is None.
# "auto" is 64 MiB on a CPU, and 1/128 of its memory on an accelerator.
tile_megabytes: float | Auto = "auto"

# A region runs in tiles if one of its values is at least this large on a rank.
tile_least_megabytes: float = 16.0

# Sharded results of plain inputs of up to so many megabytes become full plain tensors;
# larger ones are DTensors. "auto" is 256 MiB, and no limit where a graph break follows;
# 0: no result becomes plain; math.inf: all do.
gather_outputs_megabytes: float | Auto = "auto"

# Names of the results that are needed, as the model calls them; the others are None,
# and nothing is computed for them alone. "auto": all of them.
outputs: Sequence[str] | Auto = "auto"

# Blocks that repeat, as the layers of a model, become one function for Inductor, which
# compiles it once; False compiles each by itself.
fold_repeated_blocks: bool = True

# A mode of Inductor, such as "max-autotune": torch.compile(mode=...) takes no options
# beside it.
inductor_mode: str | None = "auto"

# What is saved for the backward waits in the memory of the host; for accelerators.
offload_activations: bool = False

# A mask that cannot be read as a function of positions is computed in whole on every
# rank while it takes at most this share of what a rank holds of q, k, v and the result
# of its attention call, or 16 MiB. A larger one is computed by rows where that can be
# proved, and else in whole.
whole_mask_share: float = 1.0

if TYPE_CHECKING:

    def patch(**changes: Any) -> Any: ...


install_config_module(sys.modules[__name__])
