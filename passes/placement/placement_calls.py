"""Functions that shard_graph writes into a graph, between plain and DTensor.

They are made once per mesh, so that a node's target can be compared with `is`. They run
while AOTAutograd traces, where each becomes slices and collectives. "Plain" means the
same on every rank.

Note [Gradients of replicated tensors]
A plain tensor enters as a Replicate DTensor. DTensor's from_local brings its gradient
to Replicate too: if the tensor met sharded activations, the gradient is Partial and is
summed over the ranks there. So every plain input gets the complete gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from cpcompile.geometry.layout import Layout, TokenLayout
from cpcompile.ops.dtensor.local_part import local_part

from ..graph.context import Context
from ..graph.memory_order import in_memory_order
from .edge_gradients import (
    PinnedGradient,
    UnreducedGradient,
)
from .global_losses import global_loss
from .laid_out import gather_tokens, place_tokens

Call = Callable[..., Any]


@dataclass(frozen=True)
class PlacementCalls:
    """The functions for one mesh; see `placement_calls`."""

    ranks: int  # of the whole mesh
    replicate: Call
    unreduced: Call
    shard: Call
    place: Call
    pin: Call
    unsplit: Call
    whole: Call
    whole_keys: Call
    from_local: Call
    gather: Call
    gather_tokens: Call
    to_local: Call
    mean: Call
    dropout_mask: Call
    loss: Callable[[Call], Call]
    replicated: Callable[..., Call]
    functional: Callable[[Call], Call]


def placement_calls(ctx: Context) -> PlacementCalls:
    """Return the functions that place values on the mesh of a graph, made once for it.

    They are not shared between compilations: meshes of one shape are equal, also if the
    groups of one of them are destroyed.
    """
    if "placement_calls" not in ctx.findings.shared:
        ctx.findings.shared["placement_calls"] = new_placement_calls(ctx.mesh, ctx.axis)
    found: PlacementCalls = ctx.findings.shared["placement_calls"]
    return found


def new_placement_calls(mesh: DeviceMesh, axis: int) -> PlacementCalls:
    """Make the functions for a mesh whose axis number `axis` shards the sequence."""
    everywhere = (Replicate(),) * mesh.ndim

    def cp_replicate(x: Tensor) -> DTensor:
        """Make a plain tensor Replicate; see Note [Gradients of replicated tensors]."""
        return DTensor.from_local(x, mesh, everywhere, run_check=False)

    def cp_unreduced(x: Tensor, factor: int = 1) -> DTensor:
        """Make a plain tensor Replicate.

        Its gradient is `factor` times this rank's summand.
        """
        axes = tuple(range(mesh.ndim))
        return UnreducedGradient.apply(x, mesh, everywhere, axes, factor, None)  # type: ignore[no-any-return, no-untyped-call]

    def cp_shard(x: Tensor, dim: int) -> DTensor:
        """Bring a plain tensor or a DTensor to Shard(dim) on the axis."""
        full = x if isinstance(x, DTensor) else cp_replicate(x)
        target = list(full.placements)
        target[axis] = Shard(dim)
        return full.redistribute(placements=target)

    def cp_place(
        x: Tensor,
        placements: tuple[Placement, ...],
        tokens: int | None = None,
        layout: str = "contiguous",
    ) -> DTensor:
        """Bring a plain or Replicate tensor to given placements, without communication.

        layout: the layout of the `tokens` tokens that are split on the axis.
        """
        full = x if isinstance(x, DTensor) else cp_replicate(x)
        if tokens is None or layout == "contiguous":
            return full.redistribute(placements=placements)
        token_layout = TokenLayout.of(Layout(layout), tokens, mesh.size(axis))
        return place_tokens(full, placements, axis, token_layout)

    def cp_pin(x: DTensor) -> DTensor:
        """Return x, with a gradient that is brought to the placement of x."""
        return PinnedGradient.apply(x, False)  # type: ignore[no-any-return, no-untyped-call]

    def cp_unsplit(x: DTensor) -> DTensor:
        """Return x as cp_pin does; a gradient that is a sum over the ranks may wait."""
        return PinnedGradient.apply(x, True)  # type: ignore[no-any-return, no-untyped-call]

    def cp_whole(x: DTensor) -> DTensor:
        """Return x with its parts combined; see Note [Sums that wait]."""
        whole = [Replicate() if p.is_partial() else p for p in x.placements]
        return cp_pin(x.redistribute(placements=whole))

    def cp_whole_keys(x: DTensor) -> DTensor:
        """Gather x on every rank of the axis; its gradient is a sum over the ranks."""
        target = list(x.placements)
        target[axis] = Replicate()
        return x.redistribute(placements=target)

    def cp_from_local(
        x: Tensor,
        placements: tuple[Placement, ...],
        shape: tuple[int, ...] | None,
        stride: tuple[int, ...] | None,
    ) -> DTensor:
        """Turn the local tensor of a DTensor input into that DTensor.

        shape and stride are None where all shards are equal.
        """
        size = None if shape is None else torch.Size(shape)
        return DTensor.from_local(
            x, mesh, placements, run_check=False, shape=size, stride=stride
        )

    def cp_gather(x: DTensor) -> Tensor:
        """Gather a DTensor as a plain tensor."""
        return x.full_tensor()

    def cp_gather_tokens(x: DTensor, tokens: int, layout: str) -> Tensor:
        """Gather a DTensor whose tokens lie in a layout as plain, in natural order."""
        token_layout = TokenLayout.of(Layout(layout), tokens, mesh.size(axis))
        return gather_tokens(x, axis, token_layout)

    def cp_to_local(x: DTensor, placements: tuple[Placement, ...]) -> Tensor:
        """Return the local tensor of a DTensor in the given placements."""
        return local_part(x.redistribute(placements=placements))

    def cp_mean(x: DTensor, dim: Any, keepdim: bool, dtype: Any) -> Tensor:
        """Compute x.mean(dim) as a sum over a global count.

        It is exact for uneven shards too.
        """
        dims = (
            range(x.ndim) if dim is None else ((dim,) if isinstance(dim, int) else dim)
        )
        count = 1
        for d in dims:
            count *= x.shape[d]
        return torch.sum(x, tuple(dims), keepdim, dtype=dtype) / count

    def cp_dropout_mask(
        like: Tensor, p: float, order: tuple[int, ...] | None = None
    ) -> Tensor:
        """Return the plain mask, with its factor, that one device would draw.

        order: the dimensions as they lie in the memory of one device, the outermost
        first; None is their own order. Numbers are drawn in the order of the memory.
        """
        order = tuple(range(like.ndim)) if order is None else order
        sizes = [like.shape[dim] for dim in order]
        kept = torch.ones(sizes, dtype=like.dtype, device=like.device)
        return F.dropout(kept.permute([order.index(d) for d in range(like.ndim)]), p)

    @functools.cache
    def loss(function: Call) -> Call:
        """Return a loss of torch.nn.functional on sharded values: see `global_loss`."""

        def call(
            scores: DTensor,
            target: DTensor,
            whole_target: Tensor | None,
            reduction: str,
            order: tuple[int, ...] | None = None,
            **options: Any,
        ) -> Tensor:
            return global_loss(
                function, scores, target, whole_target, reduction, options, order
            )

        call.__name__ = f"cp_{target_name(function)}"
        return call

    @functools.cache
    def replicated(target: Call, order: tuple[int, ...] | None = None) -> Call:
        """Return `target` on gathered tensors, the same on every rank.

        Its results are Replicate. order: the memory order of the dimensions, where the
        results depend on it.
        """

        def gathered(x: DTensor) -> Tensor:
            full = x.full_tensor()
            if order is None or full.ndim != len(order):
                return full
            return in_memory_order(full, order)

        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = pytree.tree_map_only(DTensor, gathered, (args, kwargs))
            return pytree.tree_map_only(Tensor, cp_replicate, target(*args, **kwargs))

        call.__name__ = f"cp_replicated_{target_name(target)}"
        return call

    @functools.cache
    def functional(target: Call) -> Call:
        """Return a call that runs in place on a copy of its first argument.

        It returns the copy.
        """

        def call(base: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            copy = base.clone()
            target(copy, *args, **kwargs)
            return copy

        call.__name__ = f"cp_functional_{target_name(target)}"
        return call

    return PlacementCalls(
        mesh.size(),
        cp_replicate,
        cp_unreduced,
        cp_shard,
        cp_place,
        cp_pin,
        cp_unsplit,
        cp_whole,
        cp_whole_keys,
        cp_from_local,
        cp_gather,
        cp_gather_tokens,
        cp_to_local,
        cp_mean,
        cp_dropout_mask,
        loss,
        replicated,
        functional,
    )


def target_name(target: Call) -> str:
    """Return the name of a call, as a part of another name."""
    return getattr(target, "__name__", str(target)).replace(".", "_")
