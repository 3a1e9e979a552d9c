"""What the steps of cp_whole::latent_keys are on a rank.

    gather: DTensor -> the whole, as a plain tensor       sum: plain -> DTensor, Partial
    keys: plain -> DTensor, Replicate       summand: DTensor, Partial -> plain

Between them calls run on plain tensors, as on one device: forward on the same numbers
on every rank, backward each on its summand of the gradient.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from cpcompile.ops.latent_steps import LatentStep

from ..graph.constant_arguments import MeshAxis
from .edges import share_of


def latent_step(cp_axis: MeshAxis, x: Any, step: str) -> Tensor:
    """Take a step."""
    mesh = cp_axis.mesh
    if step in (LatentStep.GATHER, LatentStep.SUMMAND):
        if not isinstance(x, DTensor):
            assert step == LatentStep.GATHER, "what attention reads is on the mesh"
            return x  # type: ignore[no-any-return]
        everywhere = [Replicate()] * mesh.ndim
        is_sum = step == LatentStep.SUMMAND
        mine = share_of(x, 1) if is_sum else x.redistribute(placements=everywhere)
        return mine._local_tensor
    if isinstance(x, DTensor):
        return x
    placement = Partial() if step == LatentStep.SUM else Replicate()
    return DTensor.from_local(x, mesh, [placement] * mesh.ndim, run_check=False)
