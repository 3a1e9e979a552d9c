"""Ask what a call of aten does with rows, whatever their number is.

mm(p.T, x), p.T cut along dimension 1 and x along 0   ->  a sum over the rows
softmax(x, -1), x cut along 0                          ->  cut along 0
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import Partial

from cpcompile.torch_private.fake_tensors import FakeTensorMode

from ...flow.flow import Flows, Result
from ...flow.flow import Role as FlowRole
from ...flow.shaped_calls import shaped_call
from ...graph.sequence_tokens import TokenDim

SUM = "sum"
RowRole = int | str | None
"""The role of an operand or result: the dimension of its rows, SUM, or None, which is
the same for all rows."""


class RowQuestions:
    """Questions about what aten calls do with rows; the answers are remembered."""

    def __init__(self, fake_mode: FakeTensorMode, device_type: str) -> None:
        self._flows = Flows(fake_mode, device_type)
        self._answers: dict[Any, list[RowRole] | None] = {}

    def roles(
        self, node: fx.Node, operands: Mapping[fx.Node, RowRole], rows: int
    ) -> list[RowRole] | None:
        """Return the roles of all results, or None if rows would have to move.

        None also if nothing is known of the call.

        Args:
            operands: the operands that are not the same for all rows, with their roles.
            rows: the number of rows in this call. With one row a call proves nothing,
                but it may be equal to one that was proved.
        """
        key = _key(node, operands, rows)
        if key not in self._answers:
            if rows < _MANY:
                return None
            self._answers[key] = self._ask(node, operands, rows)
        return self._answers[key]

    def _ask(
        self, node: fx.Node, operands: Mapping[fx.Node, RowRole], rows: int
    ) -> list[RowRole] | None:
        target: Any = node.target
        if torch.Tag.nondeterministic_seeded in target.tags:
            return None
        call, leaves = shaped_call(node)
        roles = [_flow_role(operands.get(x)) for x in leaves]
        flow = self._flows.of(call, roles, rows)
        if flow is None or not flow.is_local:
            return None
        result_roles = [_role(x, rows) for x in flow.tensors]
        return None if _UNKNOWN in result_roles else result_roles


_MANY = 2
_UNKNOWN = "unknown"


def _flow_role(role: RowRole) -> FlowRole:
    if role == SUM:
        return Partial()
    return TokenDim(role) if isinstance(role, int) else None


def _role(x: Result, rows: int) -> RowRole:
    if isinstance(x.role, TokenDim):
        whole = x.shape[x.role.dim] == rows
        return x.role.dim if whole else _UNKNOWN
    if x.role is None:
        return None
    return SUM if x.is_sum else _UNKNOWN


def _key(node: fx.Node, operands: Mapping[fx.Node, RowRole], rows: int) -> Any:
    """Return a key that is equal for calls that differ only in the number of rows."""

    def text(x: fx.Node) -> str:
        value, role = x.meta["val"], operands.get(x)
        if not isinstance(value, Tensor):
            return repr(value)
        shape = [*value.shape]
        if isinstance(role, int):
            shape[role] = -1
        return f"{shape} {value.stride() if role is None else ''} {value.dtype} {role}"

    args = fx.node.map_arg((node.args, node.kwargs), lambda x: _Text(text(x)))
    changed = resized(node.target, args[0], None, rows)
    return node.target, str((changed, args[1]))


class _Text(str):
    """Text that stands for a node in a key."""


def resized(target: Any, args: Any, dim: int | None, rows: int, to: int = -1) -> Any:
    """Return the arguments of a call with `to` for `rows` in the sizes of its result.

    dim: the dimension of the rows in the result; None is every dimension of that size.
    """
    if target not in SIZED:
        return args
    sizes = [
        to if size == rows and dim in (None, i) else size
        for i, size in enumerate(args[1])
    ]
    return (args[0], sizes, *args[2:])


aten = torch.ops.aten
# Calls whose second argument is the shape of the result.
SIZED = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
