"""Hand on classes of operators, decompositions, and the transforms of torch.func."""

# Decompositions of aten; seen in 2.11 to 2.15.
from torch._decomp import core_aten_decompositions, get_decompositions

# The calls that begin and end vmap, grad and jvp; seen in 2.13 and 2.15.
from torch._functorch import predispatch

# What vmap calls once before it runs; seen in 2.13 and 2.15.
from torch._functorch.vmap import lazy_load_decompositions

# The steps of an associative scan; seen in 2.13.
from torch._higher_order_ops.associative_scan import generic_associative_scan

# Writes of custom operators in joint graphs; seen in 2.13.
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2

# The classes of torch.ops; seen in 2.11 to 2.15.
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
