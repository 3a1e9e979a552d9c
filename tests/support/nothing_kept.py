"""Settings of all processes that run tests, each of which imports this.

No test finds the program of another: one may replace functions that are called while a
graph is traced, of which the key of a kept program knows nothing. The tests of
tests/cpu/compiled/test_warm_start.py switch that on.

Mistakes of ours that have a fallback are raised, Note [Refusals and mistakes].

Dynamo times the guards of each graph, and empties the caches of the processor first.
That takes a thirtieth of a second, slows down all other processes, and nobody reads it.
The garbage collector runs less often, and not after each compilation too: it took a
twentieth of the time of all tests. AOTAutograd prints its graphs for a log that no test
reads.

A group of gloo has a thread that wakes a hundred times per second, as long as the group
lives. Tests make hundreds of groups in one process, which keeps them, and their threads
took a third of the processor time of some files. Here the groups of a process share one
such thread.
"""

import functools
import gc
import os
from datetime import timedelta
from typing import Any

import torch._dynamo.config as dynamo_config
import torch._dynamo.guards
import torch._functorch._aot_autograd.graph_compile as graph_compile
import torch._functorch.config as functorch_config
from torch.distributed import Store, distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroupGloo

from cpcompile import refusals

functorch_config.enable_autograd_cache = False
refusals.raises_mistakes = True
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
gc.set_threshold(50_000, 20, 20)
dynamo_config.run_gc_after_compile = False
graph_compile._log_joint_graph = lambda *_: None
graph_compile._log_fw_bw_graphs = lambda *_: (None, None)


@functools.cache
def _device(process: int) -> Any:
    """The sockets of one process, and the thread that waits for them."""
    return ProcessGroupGloo.create_default_device()


class _OnOneDevice(type(ProcessGroupGloo)):  # type: ignore[misc]
    def __call__(
        cls, store: Store, rank: int, size: int, timeout: timedelta, **more: Any
    ) -> Any:
        # torch 2.15 also says whether a group may be reconfigured; nothing here is.
        assert not any(more.values()), more
        options = ProcessGroupGloo._Options()
        options._devices = [_device(os.getpid())]
        options._timeout = timeout
        return ProcessGroupGloo(store, rank, size, options)

    def __instancecheck__(cls, group: object) -> bool:
        return isinstance(group, ProcessGroupGloo)


class _SharedGloo(ProcessGroupGloo, metaclass=_OnOneDevice):
    """Makes the groups that torch.distributed makes."""


distributed_c10d.ProcessGroupGloo = _SharedGloo
