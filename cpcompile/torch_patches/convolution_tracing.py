"""Lets Dynamo see the right shape of a convolution of DTensors.

DTensor convolves by a handler of its own (torch 2.13), which exchanges the borders of
images that are cut along the width and takes everything else as it lies on this rank:
of a sharded sequence, one part is convolved and labelled as the whole. Only shapes
matter while Dynamo traces, and those are of the global tensors; shard_graph decides
later what is gathered.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from cpcompile.torch_patches.tracing import dynamo_traces


@functools.cache
def install() -> None:
    """Have convolutions replicated while Dynamo traces."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    call = torch.ops.aten.convolution.default
    if call in handlers:
        handlers[call] = _traceable(handlers[call])


def _traceable(handler: Any) -> Any:
    @functools.wraps(handler)
    def call(op: Any, args: Any, kwargs: Any) -> Any:
        if not dynamo_traces():
            return handler(op, args, kwargs)
        mesh = next(x.device_mesh for x in args if isinstance(x, DTensor))
        args, kwargs = pytree.tree_map_only(DTensor, _of_global_shape, (args, kwargs))
        everywhere = (Replicate(),) * mesh.ndim
        return DTensor.from_local(
            op(*args, **kwargs), mesh, everywhere, run_check=False
        )

    return call


def _of_global_shape(x: DTensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
