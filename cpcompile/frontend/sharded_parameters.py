"""`cp.shard_parameters`: parameters that take a part of their memory on each rank."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cpcompile.errors import InputError
from cpcompile.frontend.reducers import Reducer
from cpcompile.ops.dtensor.whole_parameter import DType, whole_parameter
from cpcompile.ranks.shardings import axis_index


def shard_parameters(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    axes: str | tuple[str, ...] | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Shard the parameters of a module over ranks, without wrapping it.

        cp.shard_parameters(model, mesh, axes=("dp", "cp"))
        step = torch.compile(model, backend="cp", options={"mesh": mesh})

    Parameters become DTensors with placement Shard(0), and so do gradients and the
    optimizer's state. A parameter is gathered where a module reads it, and its gradient
    is reduce-scattered; both are in the compiled graph. Names, and weights that are
    tied, stay as they are. Values come from the first rank of the axes.

    A gradient is the sum over the ranks that share a sequence, and the mean over the
    other ranks, as with FSDP2.

    Args:
        module: whose parameters are plain tensors; changed in place.
        mesh: the device mesh.
        axes: names of the axes to shard over, in the order of the mesh. None: all.
        param_dtype: dtype in which parameters are gathered and used. None: their own.
        reduce_dtype: dtype in which gradients are added up. None: the parameters' own.
        reshard_after_forward: gather again for the backward. False keeps what was
            gathered in the forward: fewer messages, more memory.

    Returns: `module`.

    Raises: InputError for a mesh without such axes, parameters that are DTensors, or
        have gradients already, and for recurrent modules.
    """
    flat = _flat(mesh, axes)
    reading = (param_dtype, reduce_dtype, reshard_after_forward)
    sharded: dict[nn.Parameter, nn.Parameter] = {}
    for name, submodule in module.named_modules():
        _check(submodule, name)
    for submodule in module.modules():
        names = [n for n, x in submodule._parameters.items() if x is not None]
        for name in names:
            x: Any = submodule._parameters[name]
            if x not in sharded:
                sharded[x] = _sharded(x, flat)
            submodule._parameters[name] = sharded[x]
        if names:
            cls: Any = type(submodule)
            submodule.__class__ = _class_that_gathers(cls, tuple(names), *reading)
    return module


def _flat(mesh: DeviceMesh, axes: str | tuple[str, ...] | None) -> DeviceMesh:
    """Return the 1-D mesh of some axes of a mesh; None: of all its axes."""
    if axes is None or isinstance(axes, str):
        axes = mesh.mesh_dim_names or () if axes is None else (axes,)
    places = [axis_index(mesh, name) for name in axes]  # raises if there is no such
    if places != sorted(set(places)) or (mesh.ndim > 1 and not places):
        raise InputError(
            f"cp.shard_parameters: got the axes {axes} of a mesh with the axes "
            f"{mesh.mesh_dim_names}; needed some of these, in their order"
        )
    if mesh.ndim == 1:
        return mesh
    grid = mesh[axes]
    return grid if grid.ndim == 1 else grid._flatten()


def _check(module: nn.Module, name: str) -> None:
    where = f"{name or 'the module'} ({type(module).__name__})"
    if isinstance(module, nn.RNNBase):
        raise InputError(
            f"cp.shard_parameters: {where} keeps a list of its parameters, which would "
            "stay whole; needed modules that read them by name"
        )
    for of, x in module._parameters.items():
        if isinstance(x, DTensor):
            raise InputError(
                f"cp.shard_parameters: {of} of {where} is a DTensor on the axes "
                f"{x.device_mesh.mesh_dim_names}; needed plain parameters: shard them "
                "once, and without tensor parallelism"
            )
        if x is not None and x.grad is not None:
            raise InputError(
                f"cp.shard_parameters: {of} of {where} has a gradient; needed none: "
                "shard parameters before the first step, and before the optimizer is "
                "made"
            )


def _sharded(x: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    placement = Shard(0) if x.ndim else Replicate()
    source = None if x.device.type == "meta" else 0
    local = distribute_tensor(x.detach(), mesh, [placement], src_data_rank=source)
    parameter = nn.Parameter(local, requires_grad=x.requires_grad)
    parameter.__dict__.update(x.__dict__)  # what others have noted on it
    return parameter


@functools.cache
def _class_that_gathers(
    cls: type[nn.Module],
    names: tuple[str, ...],
    param_dtype: DType,
    reduce_dtype: DType,
    reshard_after_forward: bool,
) -> type[nn.Module]:
    """Return a subclass of `cls` whose objects read these parameters as whole tensors.

    Modules of one class get one such class, so that Dynamo compiles their code once.
    """

    def reads(name: str) -> property:
        def read(self: nn.Module) -> Any:
            x = self._parameters[name]
            if not isinstance(x, DTensor):
                return x
            return whole_parameter(x, param_dtype, reduce_dtype, reshard_after_forward)

        return property(read)

    members: dict[str, Any] = {name: reads(name) for name in names}
    members |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), members)


def reducer_of(whole: DTensor) -> Reducer:
    """Return what reduces the gradients of a parameter of `cp.shard_parameters`."""
    ranks = frozenset(whole.device_mesh.mesh.flatten().tolist())
    return Reducer("cp.shard_parameters", ranks, mean=True)
