"""Functions between plain tensors and DTensors, in graphs and in rules.

While they are traced each becomes slices and collectives. `cp_axis` is the mesh axis
that shards the sequence. "Plain" means the same on every rank.

Note [Gradients of replicated tensors]
A plain tensor enters as a Replicate DTensor. DTensor's from_local brings its gradient
to Replicate too: if the tensor met sharded activations, the gradient is Partial and is
summed over the ranks there. So every plain input gets the complete gradient.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cpcompile.ops.dtensor.local_part import dtensor_of, local_part
from cpcompile.ops.mixers.mixer_call import MixerCall
from cpcompile.ops.mixers.state_passing import in_parts

from ..graph.constant_arguments import MeshAxis


def cp_replicate(x: Tensor, cp_axis: MeshAxis) -> DTensor:
    """Make a plain tensor Replicate; see Note [Gradients of replicated tensors]."""
    everywhere = (Replicate(),) * cp_axis.mesh.ndim
    return DTensor.from_local(x, cp_axis.mesh, everywhere, run_check=False)


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
