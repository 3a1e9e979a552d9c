"""Where a parameter that a graph gathers by itself begins, and its gradient ends.

    gather(local part) -> cp_whole.enter_parameter -> the graph
    the gradient       -> cp_whole.leave_gradient  -> its reduce-scatter

The messages of the gather have nothing to do with the sequence, and run as they are on
every rank. What is between the two lies on the axis of the sequence: a parameter is
Replicate there, and what the reduce-scatter takes is settled by its ranks
(frontend/reducers.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cpcompile.options import GradSync

from ..graph.context import Context, InputKind
from ..graph.nodes import all_nodes
from ..placement.gathered_parameters import gathered_input
from .edges import gradient_as
from .local_calls import replicated


@torch.library.custom_op("cp_whole::enter_parameter", mutates_args=())
def enter_parameter(x: Tensor, contract: str) -> Tensor:
    """Return x; `contract` is the GradSync of its gradient."""
    return x.clone()


@torch.library.custom_op("cp_whole::leave_gradient", mutates_args=())
def leave_gradient(grad: Tensor, contract: str) -> Tensor:
    """Return a gradient, on each rank as `contract` says."""
    return grad.clone()


@enter_parameter.register_fake
@leave_gradient.register_fake
def _like(x: Tensor, contract: str) -> Tensor:
    return torch.empty_like(x)


def _note(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.contract = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return leave_gradient(grad, ctx.contract), None


enter_parameter.register_autograd(_backward, setup_context=_note)


ENTER = torch.ops.cp_whole.enter_parameter.default
LEAVE = torch.ops.cp_whole.leave_gradient.default


def settle_gradients(graph: fx.Graph, ctx: Context) -> None:
    """Have the calls that gather an input settle what its gradient is."""
    contracts = {
        node.name: known.gradient.value
        for node, known in ctx.inputs.items()
        if known.kind is InputKind.LOCAL_PART
    }
    for node in list(all_nodes(graph)):
        source = gathered_input(node)
        if source is not None:
            with node.graph.inserting_after(node):
                entered = node.graph.call_function(ENTER)
            node.replace_all_uses_with(entered)
            entered.args = (node, contracts[source])
            entered.meta = dict(node.meta)


def parameter_rules(mesh: DeviceMesh) -> dict[Any, Callable[..., Any]]:
    """Return the rules of both, by call."""

    def enter(x: Tensor, contract: str) -> DTensor:
        return replicated(x, mesh)

    def leave(grad: Any, contract: str) -> Tensor:
        if not isinstance(grad, DTensor):
            grad = replicated(grad, mesh)
        whole = replicated(grad, mesh).placements
        local: Tensor = gradient_as(grad, GradSync(contract), whole)._local_tensor
        return local

    return {
        ENTER: enter,
        LEAVE: leave,
    }
