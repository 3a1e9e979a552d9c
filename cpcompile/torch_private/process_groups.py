"""Hand on what torch.distributed knows of groups, messages and profiles."""

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

__all__ = [
    "RecordFunctionFast",
    "get_default_store",
    "register_work",
    "resolve_process_group",
]
