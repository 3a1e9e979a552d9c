"""Gather operands of calls whose result has a size that only data tells, as x[mask].

    part = x[mask]                            x S(1)
      ->
    whole = cp_gather(x); part = whole[mask]  both plain: the same on every rank

Such a result has no parts: a rank does not know how many of its rows another one has.
It is computed on every rank, with what is computed from it while the size is not known.
"""

from __future__ import annotations

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...graph.calls import canonical_call
from ...graph.new_call import NewCall, with_inputs
from ...graph.nodes import fake_value, has_unknown_size, where
from ...placement.decisions import Plain
from ...placement.graph_values import GraphValues
from ...placement.placement_calls import cp_gather
from .gathered_calls import warn_of_gathered_call


def unknown_size(known: GraphValues, node: fx.Node) -> Plain | None:
    """Decide on a call on DTensors, if the size of its result is not known."""
    if not (_depends_on_data(node) or has_unknown_size(fake_value(node))):
        return None
    if any(known.is_joint(known.values.get(x)) for x in node.all_input_nodes):
        return None
    name = canonical_call(node).name or node.name
    operands = [known.value(x) for x in node.all_input_nodes]
    text = (
        f"{name} at {where(node)} runs on gathered tensors, because its data tells the "
        "size of its result; the result is correct, only slower"
    )
    warn_of_gathered_call(known.ctx, node, operands, text)

    def whole(x: fx.Node) -> fx.Node | NewCall:
        distributed = isinstance(known.value(x), DTensor)
        return NewCall(cp_gather, (x,)) if distributed else x

    return Plain(with_inputs(node, whole))


def _depends_on_data(node: fx.Node) -> bool:
    call = canonical_call(node)
    if call.name == "getitem":
        index = call.arguments["index"]
        items = index if isinstance(index, tuple | list) else (index,)
        values = [fake_value(x) for x in items]
        return any(isinstance(x, Tensor) and x.dtype == torch.bool for x in values)
    overload = call.overload
    return overload is not None and torch.Tag.dynamic_output_shape in overload.tags
