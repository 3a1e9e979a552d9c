"""Hand on the transforms of torch.func, as Dynamo writes them into graphs."""

# What undoes the transforms that Dynamo has begun; seen in 2.13 and 2.15.
from torch._C._functorch import (
    get_dynamic_layer_stack_depth,
    pop_dynamic_layer_stack_and_undo_to_depth,
)

# The calls that begin and end vmap, grad and jvp; seen in 2.13 and 2.15.
from torch._functorch import predispatch

# An autograd.Function in a graph; seen in 2.13.
from torch._functorch.autograd_function import autograd_function_apply

# What vmap calls once before it runs; seen in 2.13 and 2.15.
from torch._functorch.vmap import lazy_load_decompositions

__all__ = [
    "autograd_function_apply",
    "get_dynamic_layer_stack_depth",
    "lazy_load_decompositions",
    "pop_dynamic_layer_stack_and_undo_to_depth",
    "predispatch",
]
