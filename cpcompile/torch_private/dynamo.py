"""Hand on what Dynamo says of a frame, and AOTAutograd after it; slow to import."""

# Whether a backward is compiled, too; seen in 2.13 and 2.15.
from torch._dynamo import compiled_autograd

# AOTAutograd as a backend of Dynamo; seen in 2.13.
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop

# The backend that is registered by a name; seen in 2.13.
from torch._dynamo.backends.registry import lookup_backend

# Dynamo's way to begin anew, also with numbers for floats; seen in 2.13 and 2.15.
from torch._dynamo.exc import RestartAnalysis, TensorifyScalarRestartAnalysis

# Where Dynamo finds an input; seen in 2.13.
from torch._dynamo.source import ChainedSource, NNModuleSource

# The translator that compiles the current frame, and the floats that it has made
# constants; seen in 2.13 and 2.15.
from torch._dynamo.symbolic_convert import InstructionTranslator, TensorifyState

# What Dynamo counts, and how long it takes; seen in 2.13.
from torch._dynamo.utils import compilation_time_metrics, counters

# Its settings; seen in 2.11 to 2.15.
from torch._functorch import config as functorch_config

# What divides a joint graph; seen in 2.13.
from torch._functorch.partitioners import min_cut_rematerialization_partition

# The expression of an input, such as `L["x"]`; seen in 2.13 and 2.15.
from torch._guards import Source

# Triton kernels of the user; seen in 2.11 to 2.14.
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

# What writes to TORCH_TRACE; seen in 2.13.
from torch._logging import trace_structured
