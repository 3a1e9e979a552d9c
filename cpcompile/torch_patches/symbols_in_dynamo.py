"""Let Dynamo run calls on DTensors where sizes are symbols.

From the second sequence length on Dynamo hands symbols. Two operands of a call on
DTensors fail then (torch 2.13):

- A plain tensor, such as a mask made of positions. DTensor asks it for its number of
  elements by a method that symbolic sizes refuse. So it becomes a DTensor before the
  call; see Note [Mixing plain tensors and DTensors].
- A DTensor of which only a stride is a symbol, such as one token of each sequence. It
  counts as one without symbols, which DTensor makes a key of; but symbols have no hash.
  The shape of the result does not depend on memory, so it is taken as contiguous.

Dynamo makes a size a symbol that was another one in an earlier call, for the whole
tensor and for this rank's part each. From 16 tokens to 12 the part of the last of three
ranks keeps its 4: its graph would be another one than those of other ranks. So a part
has a symbol wherever the whole has one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch._dynamo.utils as dynamo_utils
from torch import Tensor
from torch._dynamo.variables import builder
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.fx.experimental.symbolic_shapes import DimDynamic, SubclassSymbolicContext
from torch.utils import _pytree as pytree


@functools.cache
def install() -> None:
    """Convert the operands of every call that Dynamo runs on fake tensors."""
    original = dynamo_utils.run_node

    @functools.wraps(original)
    def run_node(tracer: Any, node: Any, args: Any, kwargs: Any, nnmodule: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        mesh = next((x.device_mesh for x in leaves if isinstance(x, DTensor)), None)
        if mesh is not None and not str(node.target).endswith("_"):
            args, kwargs = pytree.tree_map_only(
                Tensor, lambda x: _for_dtensor(x, mesh), (args, kwargs)
            )
        return original(tracer, node, args, kwargs, nnmodule)

    dynamo_utils.run_node = run_node
    builder._automatic_dynamic = _with_equal_symbols(builder._automatic_dynamic)


def _with_equal_symbols(original: Any) -> Any:
    @functools.wraps(original)
    def automatic_dynamic(e: Any, *args: Any, **kwargs: Any) -> Any:
        context = original(e, *args, **kwargs)
        if isinstance(e, DTensor) and isinstance(context, SubclassSymbolicContext):
            part: Any = context.inner_contexts["_local_tensor"]
            for dim, size in enumerate(context.dynamic_sizes):
                if part.dynamic_sizes[dim] is DimDynamic.STATIC is not size:
                    part.dynamic_sizes[dim] = size
                    part.constraint_sizes[dim] = context.constraint_sizes[dim]
        return context

    return automatic_dynamic


def _for_dtensor(x: Tensor, mesh: DeviceMesh) -> Tensor:
    if not isinstance(x, DTensor):
        if not _has_symbols(x.shape):
            return x
        everywhere = (Replicate(),) * mesh.ndim
        return DTensor.from_local(x, mesh, everywhere, run_check=False)
    if _has_symbols(x.shape) or not _has_symbols(x.stride()):
        return x
    local = torch.empty_like(x._local_tensor, memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local.requires_grad_(x.requires_grad),
        x.device_mesh,
        x.placements,
        run_check=False,
        shape=x.shape,
        stride=torch.empty(x.shape, device="meta").stride(),
    )


def _has_symbols(sizes: Sequence[Any]) -> bool:
    return any(isinstance(n, torch.SymInt) for n in sizes)
