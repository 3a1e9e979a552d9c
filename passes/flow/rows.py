"""Find out whether a call computes every row of its operands by itself."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch.fx as fx

from ..graph.calls import canonical_call
from ..graph.sequence_tokens import TokenDim
from .flow import Flows
from .shaped_calls import TensorShape, shaped_call

ROWS = TokenDim(0)


def keeps_rows(flows: Flows, node: fx.Node, cut: Set[fx.Node], rows: int) -> bool:
    """Tell whether every result of the call is cut into `rows` rows if `cut` are.

    Rows are along dimension 0; all other operands are the same for all rows, and
    nothing is exchanged: the call may run on the rows that a rank has.
    """
    one_hot = canonical_call(node)
    if one_hot.name == "one_hot" and one_hot.arguments["input"] in cut:
        # With -1 classes it looks for the largest.
        return bool(one_hot.arguments["num_classes"] != -1)
    call, leaves = shaped_call(node)
    roles = [ROWS if isinstance(x, fx.Node) and x in cut else None for x in leaves]
    for value, role in zip(call.values, roles, strict=True):
        if role is not None and not _divides(rows, value):
            return False
    flow = flows.of(call, roles, rows)
    if flow is None or not flow.is_local:
        return False
    return bool(flow.tensors) and all(x.role == ROWS for x in flow.tensors)


def _divides(rows: int, value: Any) -> bool:
    if not isinstance(value, TensorShape) or not value.shape:
        return False
    return value.shape[0] > 0 and value.shape[0] % rows == 0
