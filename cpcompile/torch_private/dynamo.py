"""Hand on what Dynamo says of the frame that it compiles; slow to import."""

# Whether a backward is compiled, too; seen in 2.13 and 2.15.
from torch._dynamo import compiled_autograd

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

# The expression of an input, such as `L["x"]`; seen in 2.13 and 2.15.
from torch._guards import Source

# Triton kernels of the user; seen in 2.11 to 2.14.
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

# What writes to TORCH_TRACE; seen in 2.13.
from torch._logging import trace_structured

__all__ = [
    "ChainedSource",
    "InstructionTranslator",
    "NNModuleSource",
    "RestartAnalysis",
    "Source",
    "TensorifyScalarRestartAnalysis",
    "TensorifyState",
    "compilation_time_metrics",
    "compiled_autograd",
    "counters",
    "lookup_backend",
    "trace_structured",
    "triton_kernel_wrapper_mutation",
]
