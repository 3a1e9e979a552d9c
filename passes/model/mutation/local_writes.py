"""Write to a part of a sharded tensor, each rank in its own part of it.

    k[..., :5] = a                       k and a both S(2)
      ->
    k = cp_local_write(k, a, (S(2),), getitem)     k has a copy of a in every part

DTensor has no rule for such writes, and loses writes through a view. Its propagation of
the view tells whether a rank's part of the view is the view of the rank's part: the
view has to keep the sharding, and to be of the shape that it has on the rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from cpcompile.ops.dtensor.local_part import dtensor_of, local_part

from ...flow.trial import Trial
from ...graph.calls import function_of
from ...graph.constant_arguments import Callee, ConstantArgument
from ...graph.new_call import NewCall
from ...placement.graph_values import GraphValues
from ...placement.placement_calls import cp_replicate


@dataclass(frozen=True, repr=False)
class ViewStep(ConstantArgument):
    """A call of a view: what it calls, arguments after its source, and keywords."""

    callee: Callee
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, node: fx.Node) -> ViewStep:
        """Return the call of a node."""
        return cls(Callee(function_of(node)), node.args[1:], node.kwargs)

    @property
    def label(self) -> str:  # type: ignore[override]
        return self.callee.label

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:  # type: ignore[override]
        return self.callee.functions

    def text(self) -> str:
        return f"{self.callee} {self.args} {self.kwargs}"


def viewed(x: Any, steps: Sequence[ViewStep]) -> Any:
    """Return the view of `x` to which the steps lead."""
    for step in steps:
        x = step.callee(x, *step.args, **step.kwargs)
    return x


def written(whole: Tensor, part: Any, steps: Sequence[ViewStep]) -> Tensor:
    """Return a copy of `whole` with `part` where the steps lead; differentiable."""
    copy = whole.clone(memory_format=torch.contiguous_format)
    view = viewed(copy, steps)
    if isinstance(part, Tensor):
        view.copy_(part)
    else:
        view.fill_(part)
    return copy


def local_write(
    known: GraphValues, whole: fx.Node, part: Any, steps: Sequence[ViewStep]
) -> NewCall | None:
    """Return a call that writes on each rank by itself; None if ranks cannot."""
    value, part_value = known.value(whole), known.value(part)
    if not isinstance(value, DTensor) or any(p.is_partial() for p in value.placements):
        return None
    if not any(p.is_shard() for p in value.placements) or _reads_nodes(steps):
        return None
    if isinstance(part, fx.Node) and not isinstance(part_value, Tensor):
        return None

    def view(x: Any) -> Any:
        return viewed(x, steps)

    # Asked as if no size were a symbol: what fails then is gathered, not compiled anew.
    view_value, problem = Trial(known.trial.fake_mode).run(view, (value,), {})
    if problem is not None or not isinstance(view_value, DTensor):
        return None
    sharded_axes = [p.is_shard() for p in view_value.placements]
    if sharded_axes != [p.is_shard() for p in value.placements]:
        return None
    try:
        local = view(value.to_local())
    except (RuntimeError, IndexError):  # an index of the whole, beyond the part
        return None
    if local.shape != view_value.to_local().shape:
        return None
    if isinstance(part_value, Tensor) and not isinstance(part_value, DTensor):
        part = NewCall(cp_replicate, (part, known.cp_axis))
    return NewCall(cp_local_write, (whole, part, view_value.placements, *steps))


def cp_local_write(
    whole: DTensor, part: Any, placements: tuple[Placement, ...], *steps: ViewStep
) -> DTensor:
    """Return `whole` with `part` where the steps lead, written on each rank.

    placements: the placements of the view to which the steps lead.
    """
    if isinstance(part, DTensor):
        shape = viewed(whole.detach(), steps).shape
        same: Any = part if part.shape == shape else part.expand(shape)
        part = local_part(same.redistribute(placements=placements))
    local = written(local_part(whole), part, steps)
    return dtensor_of(local, whole.device_mesh, whole.placements, whole.shape)


def _reads_nodes(steps: Sequence[ViewStep]) -> bool:
    """Tell whether an index is a tensor of the graph, or a size."""
    nodes: list[fx.Node] = []
    for step in steps:
        fx.node.map_arg((step.args, step.kwargs), nodes.append)
    return bool(nodes)
