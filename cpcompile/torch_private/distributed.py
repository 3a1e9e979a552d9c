"""Hand on rules of DTensor, and what torch.distributed knows of groups and messages."""

from typing import Any

# Where functional collectives register a message; seen in 2.11 to 2.14.
from torch._C._distributed_c10d import _register_work as register_work

# A span in a profile, cheap to open; seen in 2.13.
from torch._C._profiler import _RecordFunctionFast as RecordFunctionFast

# The store that init_process_group made, and the only way from a name to its group;
# no public accessor; seen in 2.11 to 2.15.
from torch.distributed.distributed_c10d import _get_default_store as get_default_store
from torch.distributed.distributed_c10d import (
    _resolve_process_group as resolve_process_group,
)
from torch.distributed.tensor import DTensor

# Where DTensor moves local tensors, by itself or asked to; seen in 2.11 to 2.15.
from torch.distributed.tensor import _dispatch as dtensor_dispatch
from torch.distributed.tensor import _redistribute as dtensor_redistribute

# What a rule of DTensor is made of; seen in 2.13.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
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
from torch.distributed.tensor.placement_types import _MaskPartial as MaskPartial
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard


def by_dtensor(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the call without a handler of ours."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = handler
