"""Write to a part of a sharded tensor, each rank in its own part of it.

    k[..., :5] = a                       k and a both S(2)
      ->
    k = cp_local_write_getitem(k, a)     k has a copy of a in every part

DTensor has no rule for such writes, and loses writes through a view. Its propagation of
the view tells whether a rank's part of the view is the view of the rank's part: the
view has to keep the sharding, and to be of the shape that it has on the rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.ops.dtensor.local_part import contiguous_strides, local_part

from ...flow.trial import Trial
from ...graph.calls import function_of
from ...graph.new_call import NewCall
from ...placement.graph_values import GraphValues

WriteStep = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def view_step(node: fx.Node) -> WriteStep:
    """Return what a view calls: function, arguments after its source, and keywords."""
    return function_of(node), node.args[1:], node.kwargs


def written(whole: Tensor, part: Any, steps: Sequence[WriteStep]) -> Tensor:
    """Return a copy of `whole` with `part` where the steps lead; differentiable."""
    copy = whole.clone(memory_format=torch.contiguous_format)
    view: Any = copy
    for function, args, kwargs in steps:
        view = function(view, *args, **kwargs)
    if isinstance(part, Tensor):
        view.copy_(part)
    else:
        view.fill_(part)
    return copy


def local_write(
    known: GraphValues, whole: fx.Node, part: Any, steps: Sequence[WriteStep]
) -> NewCall | None:
    """Return a call that writes on each rank by itself; None if ranks cannot."""
    value, given = known.value(whole), known.value(part)
    if not isinstance(value, DTensor) or any(p.is_partial() for p in value.placements):
        return None
    if not any(p.is_shard() for p in value.placements) or _reads_nodes(steps):
        return None
    if isinstance(part, fx.Node) and not isinstance(given, Tensor):
        return None

    def view(x: Any) -> Any:
        for function, args, kwargs in steps:
            x = function(x, *args, **kwargs)
        return x

    # Asked as if no size were a symbol: what fails then is gathered, not compiled anew.
    found, problem = Trial(known.trial.fake_mode).run(view, (value,), {})
    if problem is not None or not isinstance(found, DTensor):
        return None
    kept = [p.is_shard() for p in found.placements]
    if kept != [p.is_shard() for p in value.placements]:
        return None
    try:
        local = view(value.to_local())
    except (RuntimeError, IndexError):  # an index of the whole, beyond the part
        return None
    if local.shape != found.to_local().shape:
        return None
    if isinstance(given, Tensor) and not isinstance(given, DTensor):
        part = NewCall(known.calls.replicate, (part,))
    call = _local_write(tuple(steps), view, found.placements)
    return NewCall(call, (whole, part))


def _local_write(
    steps: tuple[WriteStep, ...], view: Callable[[Any], Any], placements: Any
) -> Callable[[DTensor, Any], DTensor]:
    """Make a function (whole, part) on DTensors that writes on each rank.

    view: all steps in one.
    placements: the placements of what it gives.
    """

    def call(whole: DTensor, part: Any) -> DTensor:
        if isinstance(part, DTensor):
            shape = view(whole.detach()).shape
            same: Any = part if part.shape == shape else part.expand(shape)
            part = local_part(same.redistribute(placements=placements))
        return DTensor.from_local(
            written(local_part(whole), part, steps),
            whole.device_mesh,
            whole.placements,
            run_check=False,
            shape=whole.shape,
            stride=contiguous_strides(whole.shape),
        )

    names = [getattr(function, "__name__", "view") for function, _, _ in steps]
    call.__name__ = "_".join(["cp_local_write", *names])
    return call


def _reads_nodes(steps: Sequence[WriteStep]) -> bool:
    """Tell whether an index is a tensor of the graph, or a size."""
    found: list[fx.Node] = []
    for _, args, kwargs in steps:
        fx.node.map_arg((args, kwargs), found.append)
    return bool(found)
