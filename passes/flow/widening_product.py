"""Find the product that makes a value wide, as logits from hidden states.

    hidden [B, S, D] -> linear -> float -> capped [B, S, V]

Legend: B batch, S tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch.fx as fx
from torch import Tensor

from ..graph.calls import canonical_call
from ..graph.nodes import expected_shape, fake_value
from ..graph.sequence_tokens import TokenAxis
from .dim_maps import Axes
from .dim_rules import dim_map, product_map

LEAST_WIDENING = 2  # elements of the result per element of the operand

Takes = Callable[[fx.Node, Collection[fx.Node]], bool]


@dataclass(frozen=True)
class WidenedValue:
    """How a value is made from a narrow one, entry by entry of a dimension.

    calls: from the product to the value, in order. read: what they read that has the
    dimension, each with the number of it there.
    """

    calls: tuple[fx.Node, ...]
    read: dict[fx.Node, int]

    @classmethod
    def of(cls, value: fx.Node, dim: int, takes: Takes) -> WidenedValue | None:
        """Find the calls from a product that widens to `value`; None if there is none.

        takes: whether a call may be among these, given those that are.
        """
        dims, calls, read = {value: dim}, list[fx.Node](), dict[fx.Node, int]()
        factors = set[fx.Node]()
        tokens = expected_shape(fake_value(value))[dim]
        nodes = list(value.graph.nodes)
        for node in reversed(nodes[: nodes.index(value) + 1]):
            if node not in dims:
                continue
            taken = node is value or (node not in factors and takes(node, calls))
            operands = _operands(node, dims[node], tokens) if taken else None
            if operands is None:
                read[node] = dims[node]
                continue
            if product_map(node) is not None or canonical_call(node).name == "linear":
                if dims[node] == fake_value(node).dim() - 1:
                    return None  # of the weight, which is nobody's tokens
                factors.update(operands)
            calls.append(node)
            for operand, axis in operands.items():
                if dims.setdefault(operand, axis.dim) != axis.dim:
                    return None
        sizes = [expected_shape(fake_value(x)) for x in (value, *read)]
        result, *others = (math.prod(x) for x in sizes)
        if not factors or result < LEAST_WIDENING * sum(others):
            return None
        return cls(tuple(calls[::-1]), read)


def _operands(node: fx.Node, dim: int, tokens: int) -> Axes | None:
    """Return the operands of a call that have the entries of a dimension of its result.

    None if the call does not treat entries one by one.
    """
    if node.op not in ("call_function", "call_method"):
        return None
    if not isinstance(fake_value(node), Tensor):
        return None
    call_map = dim_map(node)
    if call_map is None or call_map.is_view or call_map.draws:
        return None
    axes = call_map.before(node, TokenAxis(dim), tokens)
    if not axes or any(x != TokenAxis(x.dim) for x in axes.values()):
        return None
    return axes
