"""Hand on classes of operators, decompositions, and the transforms of torch.func."""

# What undoes the transforms that Dynamo has begun; seen in 2.13 and 2.15.
from torch._C._functorch import (
    get_dynamic_layer_stack_depth,
    pop_dynamic_layer_stack_and_undo_to_depth,
)

# Decompositions of aten; seen in 2.11 to 2.15.
from torch._decomp import core_aten_decompositions, get_decompositions

# The calls that begin and end vmap, grad and jvp; seen in 2.13 and 2.15.
from torch._functorch import predispatch

# An autograd.Function in a graph; seen in 2.13.
from torch._functorch.autograd_function import autograd_function_apply

# What vmap calls once before it runs; seen in 2.13 and 2.15.
from torch._functorch.vmap import lazy_load_decompositions

# The steps of an associative scan; seen in 2.13.
from torch._higher_order_ops.associative_scan import generic_associative_scan

# Writes of custom operators in joint graphs; seen in 2.13.
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2

# The classes of torch.ops; seen in 2.11 to 2.15.
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
