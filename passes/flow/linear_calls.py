"""Tell which calls of aten are linear in some of their operands.

Calls without a rule count as not linear, and so do calls that add a constant.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.fx as fx

aten = torch.ops.aten

# Linear in the first operand, and in no other.
_IN_THE_FIRST = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.permute.default,
    aten.t.default,
    aten.transpose.int,
    aten.select.int,
    aten.slice.Tensor,
    aten.gather.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
    aten.neg.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.mul.Scalar,
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    aten.silu_backward.default,
    aten.gelu_backward.default,
    aten.threshold_backward.default,
    aten.tanh_backward.default,
    aten.sigmoid_backward.default,
    aten.native_dropout_backward.default,
}
# Linear in each of two operands, but not in both at once.
_IN_ONE = {aten.mul.Tensor, aten.mm.default, aten.bmm.default}
# Linear in all operands together.
_IN_ALL = {
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.cat.default,
    aten.slice_scatter.default,
}
# Zeros, whatever the operand is.
_ZEROS = {aten.zeros_like.default, aten.new_zeros.default}


def is_linear(node: fx.Node, variable: Collection[fx.Node]) -> bool:
    """Tell whether a call is linear in its operands that are in `variable`."""
    depends = [x in variable for x in node.all_input_nodes]
    if not any(depends):
        return True
    if node.target in _IN_THE_FIRST:
        return node.args[0] in variable and sum(depends) == 1
    if node.target in _IN_ONE:
        return sum(depends) == 1 and node.args[0] is not node.args[1]
    if node.target in _IN_ALL:
        numbers = [x for x in node.args[:2] if isinstance(x, int | float)]
        is_sum = node.target in (aten.add.Tensor, aten.sub.Tensor)
        return all(depends) and not (is_sum and numbers)
    if node.target is aten.where.self:
        condition, *chosen = node.args
        return condition not in variable and all(
            x in variable or _is_zero(x) for x in chosen
        )
    if node.target in _ZEROS:
        return True
    if node.target is aten.scatter_add.default:
        base, _, index, added = node.args
        return index not in variable and all(
            x in variable or _is_zero(x) for x in (base, added)
        )
    if node.target is aten.masked_fill.Scalar:
        first, _, filled = node.args
        return sum(depends) == 1 and first in variable and _is_zero(filled)
    return False


def _is_zero(x: Any) -> bool:
    if not isinstance(x, fx.Node):
        return bool(x == 0)
    if x.target in (aten.view.default, aten.expand.default):
        return _is_zero(x.args[0])
    if x.target is aten.scalar_tensor.default:
        return bool(x.args[0] == 0)
    if x.target is aten.full.default:
        return bool(x.args[1] == 0)
    return x.target in _ZEROS
