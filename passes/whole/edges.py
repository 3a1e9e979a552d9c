"""Where inputs, results, and the gradients of both lie at the edges of a joint graph.

AOTAutograd traces inputs and results whole, and notes what each is. What is a shard
outside has the sizes of a shard in the local graph, and is one when it runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx

# What AOTAutograd notes of inputs and results; seen in 2.13 and 2.15.
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cpcompile.cost.plans import Plan
from cpcompile.geometry.layout import Layout
from cpcompile.logs import warn_once
from cpcompile.options import GradSync

from ..graph.context import (
    PARAMETERS,
    Context,
    Findings,
    GraphInput,
    InputKind,
    OutputPlacement,
)
from ..graph.nodes import layout_outside
from .local_calls import placed
from .other_axes import Chunks
from .program_outputs import is_gathered

Placements = tuple[Placement, ...]
COPY = torch.ops.aten.copy_.default
_FOUND = (
    *("gathered_results", "rows_by_hand", "mask_forms", "localised"),
    *("relayouts", "relayouts_cancelled"),
)


@dataclass
class Edges:
    """The edges of one graph.

    inputs: of Dynamo's graph, in order. parameters: their places.
    names: of results, as the model has them. results: by place, how each leaves; None
    if whole.
    chunks: by place, those of which a result leaves.
    plain: results that are none of the user's DTensors, where tokens are.
    outcomes: one, when the graph is that of a rank.
    """

    ctx: Context
    inputs: Sequence[GraphInput]
    parameters: frozenset[int]
    names: Sequence[str]
    results: dict[int, OutputPlacement | None] = field(default_factory=dict)
    chunks: dict[int, Chunks] = field(default_factory=dict)
    plain: frozenset[int] = frozenset()
    outcomes: list[Outcome] = field(default_factory=list)

    def key(self) -> str:
        """Return all that the graph of a rank depends on, beside the whole graph."""
        ctx, findings = self.ctx, self.ctx.findings
        later = [x.name for x in findings.later_results]
        limits = ctx.gather_limit, ctx.later_bytes, ctx.keeps_layout, ctx.strict
        asked = ctx.strategy, ctx.layout, ctx.memory_budget, ctx.tie_fraction
        return (
            f"{self.inputs} {self.parameters} {self.names} {sorted(self.plain)} "
            f"{findings.outputs} {later} "
            f"{ctx.axis} {limits} {asked} {ctx.profile} {ctx.plan_texts()} "
            f"{list(findings.balanced_plans.values())}"
        )

    def note(self, warnings: Sequence[str]) -> None:
        """Note what became of the graph, with what was warned of."""
        results, findings = self.results, self.ctx.findings
        outputs = findings.outputs
        outputs[:] = [results.get(place) or x for place, x in enumerate(outputs)]
        found = {name: getattr(findings, name) for name in _FOUND}
        plans = tuple(findings.plans.values())
        self.outcomes.append(Outcome(found, outputs, plans, tuple(warnings)))

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

    def leaves(self, place: int, value: Any) -> Placements:
        """Decide how a result leaves; return its placements."""
        if place not in self.results:
            is_others = self.ctx.findings.outputs[place] is not None
            self.results[place] = None if is_others else self._leaves(place, value)
        known = self.results[place]
        return self.everywhere if known is None else known.placements

    def leaves_chunks(self, place: int, chunks: Chunks | None) -> None:
        """Note that a result leaves as token chunks; local tokens may."""
        known = self.results[place]
        if known is not None and chunks is not None and self.ctx.keeps_layout:
            self.chunks.setdefault(place, chunks)

    def laid_out(self, place: int, layout: Layout) -> None:
        """Note that a result leaves in a layout."""
        known = self.results[place]
        assert known is not None, "it leaves as a shard"
        self.results[place] = replace(known, layout=layout)

    def _leaves(self, place: int, value: Any) -> OutputPlacement | None:
        if not isinstance(value, DTensor) or place in self.plain:
            return None
        ctx, shards = self.ctx, any(hasattr(p, "dim") for p in value.placements)
        later = place in [x.number for x in ctx.findings.later_results]
        if not (ctx.takes_dtensors or ctx.keeps_layout or later):
            if not shards:
                return None
            name = f"{self.names[place]} {list(value.shape)}"
            if is_gathered(name, value, ctx):
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


@dataclass(frozen=True)
class Outcome:
    """What is found out of the graph of a rank, which is kept with its program.

    found: fields of the findings. warnings: of which each process is told.
    """

    found: dict[str, Any]
    outputs: list[OutputPlacement | None]
    plans: tuple[Plan, ...]
    warnings: tuple[str, ...]

    def tell(self, findings: Findings) -> None:
        """Write it where a program was compiled, or loaded."""
        for name, value in self.found.items():
            setattr(findings, name, value)
        findings.outputs[:] = self.outputs
        for call, plan in zip(list(findings.plans), self.plans, strict=True):
            findings.plans[call] = plan
        for text in self.warnings:
            warn_once(text)


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


def is_written_back(node: fx.Node) -> bool:
    """Tell whether a call writes into an input, which AOTAutograd does at the end."""
    return node.target is COPY and node.args[0].op == "placeholder"  # type: ignore[union-attr]
