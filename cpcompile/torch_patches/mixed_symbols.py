"""Lets Dynamo run calls on a DTensor and a plain tensor whose sizes are symbols.

DTensor asks a plain tensor that it meets for its number of elements, by a method that
symbolic sizes refuse (torch 2.13 to 2.15): a mask made of positions, beside inputs that
are DTensors, raised at the second sequence length. So the plain tensor becomes a
DTensor before; see Note [Mixing plain tensors and DTensors].
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch._dynamo.utils as dynamo_utils
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree


@functools.cache
def install() -> None:
    """Convert the operands of every call that Dynamo runs on fake tensors."""
    original = dynamo_utils.run_node

    @functools.wraps(original)
    def run_node(tracer: Any, node: Any, args: Any, kwargs: Any, nnmodule: Any) -> Any:
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        mesh = next((x.device_mesh for x in given if isinstance(x, DTensor)), None)
        if mesh is not None and any(map(_is_plain_with_symbols, given)):
            args, kwargs = pytree.tree_map_only(
                Tensor, lambda x: _distributed(x, mesh), (args, kwargs)
            )
        return original(tracer, node, args, kwargs, nnmodule)

    dynamo_utils.run_node = run_node


def _is_plain_with_symbols(x: Tensor) -> bool:
    return not isinstance(x, DTensor) and any(
        isinstance(n, torch.SymInt) for n in x.shape
    )


def _distributed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    if not _is_plain_with_symbols(x):
        return x
    everywhere = (Replicate(),) * mesh.ndim
    return DTensor.from_local(x, mesh, everywhere, run_check=False)
