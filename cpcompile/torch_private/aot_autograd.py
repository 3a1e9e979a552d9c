"""Hand on AOTAutograd, its settings and its partitioner."""

# AOTAutograd as a backend of Dynamo; seen in 2.13.
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop

# Its settings; seen in 2.11 to 2.15.
from torch._functorch import config as functorch_config

# What divides a joint graph; seen in 2.13.
from torch._functorch.partitioners import min_cut_rematerialization_partition

__all__ = [
    "aot_autograd",
    "boxed_nop",
    "functorch_config",
    "min_cut_rematerialization_partition",
]
