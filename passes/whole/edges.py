"""Where inputs, results, and the gradients of both lie at the edges of a joint graph.

AOTAutograd traces inputs and results whole, and notes what each is. What is a shard
outside has the sizes of a shard in the local graph, and is one when it runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.fx as fx

# What AOTAutograd notes of inputs and results; seen in 2.13 and 2.15.
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cpcompile.geometry.layout import Layout
from cpcompile.options import GradSync

from ..graph.context import PARAMETERS, Context, GraphInput, InputKind, OutputPlacement
from ..graph.nodes import layout_outside
from ..model.sharding.program_outputs import is_gathered
from .local_calls import placed

Placements = tuple[Placement, ...]


@dataclass
class Edges:
    """The edges of one graph.

    inputs: of Dynamo's graph, in order. parameters: their places.
    count: of results. results: by place, how each leaves; None if whole.
    """

    ctx: Context
    inputs: Sequence[GraphInput]
    parameters: frozenset[int]
    count: int
    results: dict[int, OutputPlacement | None] = field(default_factory=dict)

    def input(self, node: fx.Node) -> tuple[GraphInput | None, bool]:
        """Return what an input is, and whether it is a parameter or an activation."""
        place = getattr(node.meta.get("desc"), "idx", None)
        if place is None or self.inputs[place].kind is InputKind.LOCAL_PART:
            return None, False
        known = self.inputs[place]
        kinds = (*PARAMETERS, InputKind.ACTIVATION)
        return known, known.kind in kinds or place in self.parameters

    def placements_inside(self, known: GraphInput) -> Placements:
        """Return where the values of an input lie, or the parts of ids."""
        if known.kind is InputKind.FULL:
            assert known.dim is not None, "what is sharded has a dimension"
            return self.on_axis(Shard(known.dim))
        return known.placements or self.everywhere

    @property
    def everywhere(self) -> Placements:
        """Return the placements of what every rank has in whole."""
        return (Replicate(),) * self.ctx.mesh.ndim

    def on_axis(self, placement: Placement) -> Placements:
        """Return a placement on the axis of the sequence; the others have all."""
        placements = list(self.everywhere)
        placements[self.ctx.axis] = placement
        return tuple(placements)

    def result_of_tangent(self, node: fx.Node) -> int | None:
        """Return the place of the result whose gradient an input is, if it is one."""
        desc = node.meta.get("desc")
        if not isinstance(desc, TangentAOTInput):
            return None
        return getattr(desc.output, "idx", None)

    def leaves(self, place: int, node: fx.Node, value: Any) -> Placements:
        """Decide how a result leaves; return its placements."""
        if place not in self.results:
            is_others = self.ctx.findings.outputs[place] is not None
            self.results[place] = (
                None if is_others else self._leaves(place, node, value)
            )
        known = self.results[place]
        return self.everywhere if known is None else known.placements

    def laid_out(self, place: int, layout: Layout) -> None:
        """Note that a result leaves in a layout."""
        known = self.results[place]
        assert known is not None, "it leaves as a shard"
        self.results[place] = replace(known, layout=layout)

    def _leaves(self, place: int, node: fx.Node, value: Any) -> OutputPlacement | None:
        if not isinstance(value, DTensor):
            return None
        ctx, shards = self.ctx, any(hasattr(p, "dim") for p in value.placements)
        later = place in [x.number for x in ctx.findings.later_results]
        if not (ctx.takes_dtensors or ctx.keeps_layout or later):
            if not shards:
                return None
            if is_gathered(node, value, ctx):
                name = f"{node.name} {list(value.shape)}"
                ctx.findings.gathered_results.append(name)
                return None
        placements = tuple(
            p if isinstance(p, Shard) else Replicate() for p in value.placements
        )
        return OutputPlacement(placements, *layout_outside(value))

    def gradient(self, note: Any) -> GraphInput | None:
        """Return the input whose gradient a result is, by what is noted of it."""
        if not isinstance(note, GradAOTOutput):
            return None
        place = getattr(note.grad_of, "idx", None)
        return None if place is None else self.inputs[place]

    def place(self, note: Any) -> int | None:
        """Return the place of a result of Dynamo's graph, by what is noted of it."""
        return note.idx if isinstance(note, PlainAOTOutput) else None


def placed_as(x: DTensor, placements: Placements) -> DTensor:
    """Bring x to placements."""
    return x.redistribute(placements=placements)


def share_of(x: DTensor, factor: int) -> DTensor:
    """Return `factor` times this rank's summand of x."""
    mesh = x.device_mesh
    placements = [p if p.is_partial() else Replicate() for p in x.placements]
    whole = x.redistribute(placements=placements)
    alike = [mesh.size(i) for i, p in enumerate(placements) if not p.is_partial()]
    local = whole._local_tensor * (factor / math.prod(alike))
    return placed(local, mesh, [Partial()] * mesh.ndim, x)


def gradient_as(x: DTensor, contract: GradSync, placements: Placements) -> DTensor:
    """Bring the gradient of an input to what the input gets outside.

    placements: those of the input.
    """
    if contract is GradSync.REDUCE:
        return x.redistribute(placements=placements)
    average = contract is GradSync.AVERAGE
    return share_of(x, x.device_mesh.size() if average else 1)
