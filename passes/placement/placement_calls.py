"""Functions between plain tensors and DTensors, in graphs and in rules.

While they are traced each becomes slices and collectives. `cp_axis` is the mesh axis
that shards the sequence. "Plain" means the same on every rank.

Note [Gradients of replicated tensors]
A plain tensor enters as a Replicate DTensor. DTensor's from_local brings its gradient
to Replicate too: if the tensor met sharded activations, the gradient is Partial and is
summed over the ranks there. So every plain input gets the complete gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cpcompile.geometry.layout import Layout, TokenLayout
from cpcompile.ops.dtensor.local_part import dtensor_of, local_part
from cpcompile.ops.mixers.mixer_call import MixerCall
from cpcompile.ops.mixers.state_passing import in_parts
from cpcompile.torch_private.fake_tensors import is_traceable_wrapper_subclass

from ..graph.constant_arguments import MeshAxis
from .edge_gradients import UnreducedGradient
from .laid_out import gather_tokens


def cp_replicate(x: Tensor, cp_axis: MeshAxis) -> DTensor:
    """Make a plain tensor Replicate; see Note [Gradients of replicated tensors].

    The parts of a tensor of a class of its own are made so, since its calls are theirs.
    """
    if is_traceable_wrapper_subclass(x) and not isinstance(x, DTensor):
        return _ReplicatedParts.apply(x, cp_axis)
    everywhere = (Replicate(),) * cp_axis.mesh.ndim
    return DTensor.from_local(x, cp_axis.mesh, everywhere, run_check=False)


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
