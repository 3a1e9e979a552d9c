"""Functions that shard_graph writes into a graph, between plain and DTensor.

They run while AOTAutograd traces, where each becomes slices and collectives. `on` is
the mesh axis that shards the sequence. "Plain" means the same on every rank.

Note [Gradients of replicated tensors]
A plain tensor enters as a Replicate DTensor. DTensor's from_local brings its gradient
to Replicate too: if the tensor met sharded activations, the gradient is Partial and is
summed over the ranks there. So every plain input gets the complete gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cpcompile.geometry.layout import Layout, TokenLayout
from cpcompile.ops.dtensor.local_part import dtensor_of, local_part
from cpcompile.ops.mixers.mixer_call import MixerCall
from cpcompile.ops.mixers.state_passing import in_parts
from cpcompile.torch_private import pytree
from cpcompile.torch_private.fake_tensors import is_traceable_wrapper_subclass

from ..graph.constant_arguments import Callee, MeshAxis
from ..graph.memory_order import in_memory_order
from .edge_gradients import PinnedGradient, UnreducedGradient
from .laid_out import gather_tokens, in_natural_order, place_tokens


def cp_replicate(x: Tensor, cp_axis: MeshAxis) -> DTensor:
    """Make a plain tensor Replicate; see Note [Gradients of replicated tensors].

    The parts of a tensor of a class of its own are made so, since its calls are theirs.
    """
    if is_traceable_wrapper_subclass(x) and not isinstance(x, DTensor):
        return _ReplicatedParts.apply(x, cp_axis)
    everywhere = (Replicate(),) * cp_axis.mesh.ndim
    return DTensor.from_local(x, cp_axis.mesh, everywhere, run_check=False)


def cp_share_of_gradient(x: Tensor, cp_axis: MeshAxis) -> Tensor:
    """Return x; each rank gets its share of the gradient, which is complete on all."""
    return _Share.apply(x, cp_axis.mesh.size())  # type: ignore[no-any-return, no-untyped-call]


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / ctx.ranks, None


class _ReplicatedParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, cp_axis: MeshAxis) -> Any:
        return _changed(x, lambda part: cp_replicate(part, cp_axis))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if isinstance(grad, DTensor):
            return grad.full_tensor(), None
        return _changed(grad, DTensor.full_tensor), None


def _changed(x: Any, change: Callable[[Any], Tensor]) -> Any:
    """Return a tensor of a class of its own, made of changed parts."""
    names, others = x.__tensor_flatten__()
    parts = {name: change(getattr(x, name)) for name in names}
    return type(x).__tensor_unflatten__(parts, others, x.shape, x.stride())


def cp_unreduced(x: Tensor, cp_axis: MeshAxis, factor: int = 1) -> DTensor:
    """Make a plain tensor Replicate.

    Its gradient is `factor` times this rank's summand.
    """
    axes = tuple(range(cp_axis.mesh.ndim))
    everywhere = (Replicate(),) * cp_axis.mesh.ndim
    return UnreducedGradient.apply(x, cp_axis.mesh, everywhere, axes, factor, None)  # type: ignore[no-any-return, no-untyped-call]


def cp_shard(x: Tensor, cp_axis: MeshAxis, dim: int) -> DTensor:
    """Bring a plain tensor or a DTensor to Shard(dim) on the axis."""
    full = x if isinstance(x, DTensor) else cp_replicate(x, cp_axis)
    target = list(full.placements)
    target[cp_axis.axis] = Shard(dim)
    return full.redistribute(placements=target)


def cp_exchange(x: DTensor, cp_axis: MeshAxis, source: int, target: int) -> DTensor:
    """Bring a DTensor from Shard(source) to Shard(target) on the axis."""
    group = cp_axis.mesh.get_group(cp_axis.axis).group_name
    rows, columns = x.shape[source], x.shape[target]
    placements = list(x.placements)
    placements[cp_axis.axis] = Shard(target)
    exchanged = torch.ops.cp.dim_exchange(
        local_part(x), source, rows, target, columns, group
    )
    return dtensor_of(exchanged, cp_axis.mesh, placements, x.shape)


def cp_log_sigmoid(x: DTensor) -> DTensor:
    """Compute logsigmoid by its formula, in calls that DTensor has rules for."""
    below = torch.minimum(x, torch.zeros_like(x))
    return below - torch.log1p(torch.exp(-x.abs()))  # type: ignore[return-value]


def cp_take(x: Tensor, index: Tensor) -> Tensor:
    """Return x.take(index)."""
    return x.flatten()[index.flatten()].view(index.shape)


def cp_prelu(x: DTensor, weight: Tensor) -> Tensor:
    """Compute prelu by its formula: DTensor has no rule for its backward."""
    shape = (1, -1, *(1 for _ in range(x.ndim - 2))) if weight.ndim else ()
    scaled = x * (weight.view(shape) if x.ndim > 1 else weight)
    return torch.where(x > 0, x, scaled)


def cp_mixed_in_parts(
    tensors: list[DTensor], call: str, cp_axis: MeshAxis
) -> list[DTensor]:
    """Call a mixer on the tokens of each rank, from the state of the ranks before it.

    tensors: as for cp::mixer; what has tokens is split along them on the axis, and the
    rest is the same on every rank.
    """
    mixer_call = MixerCall.of_text(call)
    tokens = mixer_call.mixer.tokens
    whole = [Replicate()] * cp_axis.mesh.ndim
    summed: list[Placement] = list(whole)
    summed[cp_axis.axis] = Partial()
    locals_, length = [], 0
    for name, x in zip(mixer_call.names, tensors, strict=True):
        if name in tokens:
            own: list[Placement] = list(whole)
            own[cp_axis.axis] = Shard(tokens[name])
            locals_.append(local_part(x.redistribute(placements=own)))
            length = x.shape[tokens[name]]
        else:
            locals_.append(local_part(x.redistribute(placements=whole), summed))
    results = []
    group = cp_axis.mesh.get_group(cp_axis.axis).group_name
    parts = in_parts(mixer_call, locals_, group)
    for name, part in zip(mixer_call.result_names, parts, strict=True):
        shape, placements = list(part.shape), list(whole)
        if name in tokens:
            shape[tokens[name]] = length
            placements[cp_axis.axis] = Shard(tokens[name])  # type: ignore[call-overload]
        results.append(dtensor_of(part, cp_axis.mesh, placements, shape))
    return results


def cp_place(
    x: Tensor,
    cp_axis: MeshAxis,
    placements: tuple[Placement, ...],
    tokens: int | None = None,
    layout: str = "contiguous",
) -> DTensor:
    """Bring a plain or Replicate tensor to given placements, without communication.

    layout: the layout of the `tokens` tokens that are split on the axis.
    """
    full = x if isinstance(x, DTensor) else cp_replicate(x, cp_axis)
    if tokens is None or layout == "contiguous":
        return full.redistribute(placements=placements)
    token_layout = TokenLayout.of(Layout(layout), tokens, cp_axis.size)
    return place_tokens(full, placements, cp_axis.axis, token_layout)


def cp_pin(x: DTensor) -> DTensor:
    """Return x, with a gradient that is brought to the placement of x."""
    return PinnedGradient.apply(x, False)  # type: ignore[no-any-return, no-untyped-call]


def cp_unsplit(x: DTensor) -> DTensor:
    """Return x as cp_pin does; a gradient that is a sum over the ranks may wait."""
    return PinnedGradient.apply(x, True)  # type: ignore[no-any-return, no-untyped-call]


def cp_reduce_partial(x: DTensor) -> DTensor:
    """Return x with its parts combined; see Note [Sums that wait]."""
    whole = [Replicate() if p.is_partial() else p for p in x.placements]
    return cp_pin(x.redistribute(placements=whole))


def cp_gather_keys(x: DTensor, cp_axis: MeshAxis) -> DTensor:
    """Gather x on every rank of the axis; its gradient is a sum over the ranks."""
    target = list(x.placements)
    target[cp_axis.axis] = Replicate()
    return x.redistribute(placements=target)


def cp_key_source(
    x: DTensor, cp_axis: MeshAxis, tokens: int | None = None, layout: str = "contiguous"
) -> Tensor:
    """Gather what keys are made of as a plain tensor, its tokens in natural order.

    The gradient of each rank is a summand. layout: the one in which the `tokens` lie.
    """
    placements: list[Placement] = list(x.placements)
    summed = [Partial()] * len(placements)
    target = [Replicate()] * len(placements)
    whole = local_part(x.redistribute(placements=target), summed)
    if tokens is None or layout == "contiguous":
        return whole
    token_layout = TokenLayout.of(Layout(layout), tokens, cp_axis.size)
    return in_natural_order(whole, placements[cp_axis.axis], token_layout)


def cp_from_local(
    x: Tensor,
    cp_axis: MeshAxis,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...] | None,
    stride: tuple[int, ...] | None,
) -> DTensor:
    """Turn the local tensor of a DTensor input into that DTensor.

    shape and stride are None where all shards are equal.
    """
    size = None if shape is None else torch.Size(shape)
    return DTensor.from_local(
        x, cp_axis.mesh, placements, run_check=False, shape=size, stride=stride
    )


def cp_gather(x: DTensor) -> Tensor:
    """Gather a DTensor as a plain tensor."""
    return x.full_tensor()


def cp_gather_tokens(x: DTensor, cp_axis: MeshAxis, tokens: int, layout: str) -> Tensor:
    """Gather a DTensor whose tokens lie in a layout as plain, in natural order."""
    token_layout = TokenLayout.of(Layout(layout), tokens, cp_axis.size)
    return gather_tokens(x, cp_axis.axis, token_layout)


def cp_to_local(x: DTensor, placements: tuple[Placement, ...]) -> Tensor:
    """Return the local tensor of a DTensor in the given placements."""
    return local_part(x.redistribute(placements=placements))


def cp_mean(x: DTensor, dim: Any, keepdim: bool, dtype: Any) -> Tensor:
    """Compute x.mean(dim) as a sum over a global count.

    It is exact for uneven shards too. See Note [Gradients of sums].
    """
    dims = range(x.ndim) if dim is None else ((dim,) if isinstance(dim, int) else dim)
    count = 1
    for d in dims:
        count *= x.shape[d]
    summed = cp_pin(x) if x.requires_grad else x
    return torch.sum(summed, tuple(dims), keepdim, dtype=dtype) / count


def cp_repeat(x: Tensor, repeats: tuple[int, ...], dim: int) -> Tensor:
    """Compute x.repeat(repeats), which repeats `dim` as a view that DTensor can split.

    x.repeat(4, 1)  ->  x.unsqueeze(0).expand(4, -1, -1).flatten(0, 1)
    """
    others = [*repeats[:dim], 1, *repeats[dim + 1 :]]
    once = x if set(others) == {1} else x.repeat(others)
    sizes = [-1] * (x.ndim + 1)
    sizes[dim] = repeats[dim]
    return once.unsqueeze(dim).expand(sizes).flatten(dim, dim + 1)


def cp_dropout_mask(
    like: Tensor, p: float, order: tuple[int, ...] | None = None
) -> Tensor:
    """Return the plain mask, with its factor, that one device would draw.

    order: the dimensions as they lie in the memory of one device, the outermost
    first; None is their own order. Numbers are drawn in the order of the memory.
    """
    order = tuple(range(like.ndim)) if order is None else order
    sizes = [like.shape[dim] for dim in order]
    ones = torch.ones(sizes, dtype=like.dtype, device=like.device)
    return F.dropout(ones.permute([order.index(d) for d in range(like.ndim)]), p)


def cp_replicated(
    target: Callee, cp_axis: MeshAxis, /, *args: Any, **kwargs: Any
) -> Any:
    """Call `target` on gathered tensors, the same on every rank; return Replicate."""
    return cp_replicated_in_order(target, cp_axis, None, *args, **kwargs)


def cp_replicated_in_order(
    target: Callee,
    cp_axis: MeshAxis,
    order: tuple[int, ...] | None,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call `target` as cp_replicated does, on tensors in one memory order.

    order: the dimensions of the result as they lie in memory, where it depends on that.
    """

    def gathered(x: DTensor) -> Tensor:
        full = x.full_tensor()
        if order is None or full.ndim != len(order):
            return full
        return in_memory_order(full, order)

    def replicated(x: Tensor) -> DTensor:
        return cp_replicate(x, cp_axis)

    args, kwargs = pytree.tree_map_only(DTensor, gathered, (args, kwargs))
    return pytree.tree_map_only(Tensor, replicated, target(*args, **kwargs))


def cp_functional(base: Tensor, target: Callee, /, *args: Any, **kwargs: Any) -> Tensor:
    """Call `target`, which works in place, on a copy of `base`; return the copy."""
    copy = base.clone()
    target(copy, *args, **kwargs)
    return copy


def cp_write_everywhere(
    x: DTensor, target: Callee, /, *args: Any, **kwargs: Any
) -> DTensor:
    """Call `target`, which works in place, on what every rank has of `x`.

    Each rank writes all of it, as one device would: a parameter under no_grad.
    """

    def whole(y: DTensor) -> Tensor:
        return y.full_tensor()

    args, kwargs = pytree.tree_map_only(DTensor, whole, (args, kwargs))
    target(x._local_tensor, *args, **kwargs)
    return x


def cp_renorm(x: Tensor, ids: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """Scale the rows of a table that `ids` name, as F.embedding does, on every rank."""
    whole = ids.full_tensor() if isinstance(ids, DTensor) else ids
    with torch.no_grad():
        table = x._local_tensor if isinstance(x, DTensor) else x
        torch.embedding_renorm_(table, whole, max_norm, norm_type)
    return x
