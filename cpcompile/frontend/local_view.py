"""`cp.ContextParallel`: modules that take and return this rank's tokens."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from cpcompile.errors import InputError
from cpcompile.geometry.layout import TokenLayout
from cpcompile.ops.dtensor.local_part import dtensor_of, local_part, no_view
from cpcompile.options import parse_options
from cpcompile.ranks.layout_marks import mark
from cpcompile.ranks.local_batches import sequence_of
from cpcompile.ranks.shardings import check_dim
from cpcompile.ranks.stand_ins import stand_in
from cpcompile.torch_patches.in_flight import arrived
from cpcompile.torch_private import pytree
from cpcompile.torch_private.dynamo import lookup_backend


class ContextParallel(ParallelStyle):
    """Compile a module with backend "cp" for local tokens.

        parallelize_module(block, mesh["cp"], cp.ContextParallel({"x": 1}))

    The module's arguments and results are plain tensors with this rank's tokens of the
    batch that `shard_batch` cut last, so that nothing is gathered between modules.
    Inside, positions, masks, shifts and losses are those of the whole sequence.

    Gradients come from each rank's own loss: a parameter gets this rank's share. FSDP2
    or DDP over an axis that includes this one adds up the shares. Where it takes the
    mean, the loss of the whole batch is the mean of the ranks' losses. A result that is
    the same on every rank, such as a loss, counts on every rank.

    Args:
        shard: argument name -> dimension of the tokens, of tensors or nests of them.
            None: dimension 1 of the first argument.
        options: options of backend="cp" other than "mesh", "axis" and "shard".
        compile_kwargs: arguments of torch.compile, such as fullgraph=True.
    """

    def __init__(
        self,
        shard: Mapping[str, int] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        **compile_kwargs: Any,
    ) -> None:
        super().__init__()
        taken = {"mesh", "axis", "shard"} & set(options or {})
        if taken:
            raise InputError(
                f"cp.ContextParallel: got the options {sorted(taken)}, which follow "
                "from the mesh and from `shard`; leave them away"
            )
        self._shard = None if shard is None else dict(shard)
        self._options = dict(options or {})
        parse_options(self._options)
        self._compile_kwargs = compile_kwargs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Replace the module's forward, as `parallelize_module` asks for."""
        if device_mesh.ndim != 1:
            raise InputError(
                f"cp.ContextParallel: got a mesh of {device_mesh.ndim} axes "
                f'{device_mesh.mesh_dim_names}; needed one axis: mesh["cp"]'
            )
        names = device_mesh.mesh_dim_names
        axis = "cp" if names is None else names[0]
        signature = inspect.signature(module.forward)
        dims = self._dims(signature, type(module).__name__)
        kwargs = {"options": self._options | {"axis": axis}, **self._compile_kwargs}
        view = LocalView(module, kwargs, signature, dims, device_mesh)
        module.forward = functools.wraps(module.forward)(view)
        return module

    def _dims(self, signature: inspect.Signature, name: str) -> dict[str, int]:
        names = list(signature.parameters)
        if self._shard is None:
            if not names:
                raise InputError(
                    f"cp.ContextParallel: {name}.forward takes no argument; needed one "
                    "with tokens"
                )
            return {names[0]: 1}
        any_name = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        missing = sorted(set(self._shard) - set(names))
        if missing and not any_name:
            raise InputError(
                f"cp.ContextParallel: shard names {missing}, and {name}.forward has "
                f"the arguments {names}; needed some of these"
            )
        return self._shard


def local_cp(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compile as backend "cp" a graph of tensors in the local view."""
    backend: Callable[..., Any] = lookup_backend("cp")
    return backend(gm, inputs, local_view=True, **kwargs)


local_cp.__name__ = "cp"  # by which Dynamo and its errors call it


class LocalView:
    """The forward of a module for local tokens, compiled in its first call.

    Before that call the parameters may become DTensors of tensor parallelism.
    """

    compiler_name = "cp"  # as backends have it, to be known as compiled

    def __init__(
        self,
        module: nn.Module,
        compile_kwargs: dict[str, Any],
        signature: inspect.Signature,
        dims: dict[str, int],
        mesh: DeviceMesh,
    ) -> None:
        self._module, self._forward = weakref.ref(module), module.forward
        self._compile_kwargs, self._signature = compile_kwargs, signature
        self._dims, self._mesh, self._name = dims, mesh, type(module).__name__
        self._compiled: Callable[..., Any] | None = None
        self._other: DeviceMesh | None = None  # of tensor parallelism

    def _compile(self) -> Callable[..., Any]:
        module, kwargs = self._module(), self._compile_kwargs
        assert module is not None, "its forward is called"
        for x in module.parameters():
            if isinstance(x, DTensor) and x.device_mesh != self._mesh:
                self._other = x.device_mesh
                kwargs = kwargs | {"fullgraph": True}  # see stand_ins.py
                break
        lookup_backend("cp")  # loads what it changes in torch, before Dynamo traces
        return torch.compile(self._forward, backend=local_cp, **kwargs)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; raise InputError for tokens that are not this rank's."""
        if self._compiled is None:
            self._compiled = self._compile()
        bound = self._signature.bind(*args, **kwargs)
        for name, dim in self._dims.items():
            values = bound.arguments
            if name not in values:  # left away, or in **kwargs
                more = (x for x in values.values() if isinstance(x, dict) and name in x)
                values = next(more, {})
            if name in values:
                values[name] = pytree.tree_map_only(
                    Tensor, functools.partial(self._entering, name, dim), values[name]
                )
        results = self._compiled(*bound.args, **bound.kwargs)
        return pytree.tree_map_only(DTensor, _leaving, results)

    def _entering(self, name: str, dim: int, x: Tensor) -> Tensor:
        """Turn local tokens into the DTensor of the whole sequence, or its stand-in."""
        where, x = f"argument {name!r} of {self._name}", arrived(x)
        dim = check_dim(where, x, dim)
        sequence = sequence_of(x, self._mesh.get_group())
        if isinstance(x, DTensor) or sequence is None:
            got = "a DTensor" if sequence else "no batch of cp.shard_batch before it"
            raise InputError(
                f"cp.ContextParallel: {where}: got {got}; needed plain tensors of this "
                "rank's tokens: batch = cp.shard_batch(batch, mesh)"
            )
        ranks, rank = self._mesh.size(), self._mesh.get_local_rank()
        length, parts = sequence.length, 1
        layout = TokenLayout.of(sequence.layout, length, ranks)
        counts = [layout.count(peer) for peer in range(ranks)]
        chunks = counts
        if self._other is not None and x.shape[dim] != counts[rank]:
            parts = self._other.size()
            layout = TokenLayout.of(sequence.layout, length // parts, ranks)
            chunks = [layout.count(peer) for peer in range(ranks)]
        is_own = x.shape[dim] == chunks[rank]
        if not is_own or [n * parts for n in chunks] != counts:
            raise InputError(
                f"cp.ContextParallel: {where}: got {x.shape[dim]} tokens in dimension "
                f"{dim} of {list(x.shape)}; needed {counts[rank]}, this rank's "
                f"of the {sequence.length} of the last batch: "
                f"batch = cp.shard_batch(batch, mesh){self._or_chunks(counts)}"
            )
        shape = torch.Size((*x.shape[:dim], length // parts, *x.shape[dim + 1 :]))
        tokens = dtensor_of(x.contiguous(), self._mesh, [Shard(dim)], shape)
        mark(tokens, layout.layout)
        if self._other is None:
            return tokens
        return stand_in(tokens, self._other if parts > 1 else None)

    def _or_chunks(self, counts: list[int]) -> str:
        if self._other is None:
            return ""
        names, ranks = self._other.mesh_dim_names, self._other.size()
        return (
            f", or the chunk of them that a rank of {names} has, of which all "
            f"{ranks} ranks need equally many: ranks have {counts} tokens"
        )


def _leaving(x: DTensor) -> Tensor:
    """Return the local part; a rank has a share of a replicated value's gradient."""
    grad_placements = [p if p.is_shard() else Partial() for p in x.placements]
    return no_view(local_part(x, grad_placements))
