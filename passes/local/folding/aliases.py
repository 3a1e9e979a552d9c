"""Tell which results share memory with an operand.

What a function returns must be memory of its own: Inductor frees and overwrites the
results and the operands of a call as if none of them shared any.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.torch_private.operators import OpOverload

aten = torch.ops.aten

# Views whose schema says that they copy.
_VIEWS = (
    aten._unsafe_view.default,
    torch.ops.prims.inductor_force_stride_order.default
    if hasattr(torch.ops.prims, "inductor_force_stride_order")
    else aten._unsafe_view.default,
)
# Copies, unless there is nothing to change.
_CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)


def source(node: fx.Node) -> fx.Node | None:
    """Return the operand in whose memory the result of `node` may lie, or None."""
    target = node.target
    if target is operator.getitem:
        tuple_node = node.args[0]
        assert isinstance(tuple_node, fx.Node), f"{node} is no part of a result"
        return tuple_node if source(tuple_node) is not None else None
    if not isinstance(target, OpOverload):
        return None
    operands = node.all_input_nodes
    if not operands:
        return None
    if target in _VIEWS or (target in _CASTS and _same(node, operands[0])):
        return operands[0]
    if any(x.alias_info is not None for x in target._schema.returns):
        return operands[0]
    return None


def _same(node: fx.Node, operand: fx.Node) -> bool:
    new, old = node.meta["val"], operand.meta["val"]
    if not (isinstance(new, Tensor) and isinstance(old, Tensor)):
        return False
    return (new.dtype, new.device) == (old.dtype, old.device)
