"""Hand on the rules of DTensor, and how it moves local tensors."""

# Where DTensor moves local tensors, by itself or asked to; seen in 2.11 to 2.15.
from torch.distributed.tensor import _dispatch as dtensor_dispatch
from torch.distributed.tensor import _redistribute as dtensor_redistribute

# What a rule of DTensor is made of; seen in 2.13.
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import (
    OpSchema,
    OpSpec,
    OpStrategy,
    RuntimeSchemaInfo,
)
from torch.distributed.tensor._ops.utils import generate_redistribute_costs

# Where the part of a rank begins; seen in 2.13.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# The placement of a flattened sequence; seen in 2.13.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = [
    "DTensorSpec",
    "OpSchema",
    "OpSpec",
    "OpStrategy",
    "RuntimeSchemaInfo",
    "StridedShard",
    "compute_local_shape_and_global_offset",
    "dtensor_dispatch",
    "dtensor_redistribute",
    "generate_redistribute_costs",
]
