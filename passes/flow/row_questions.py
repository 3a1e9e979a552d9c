"""Ask DTensor what a call of aten does with rows: on a mesh with one rank per row.

    mm(p.T, x), p.T cut along dimension 1 and x along 0   ->  a sum over the rows
    softmax(x, -1), x cut along 0                          ->  cut along 0

Nothing may move: then every rank has computed its own row, or its own summand.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from .misread_rules import must_not_wait
from .permutation_proof import (
    TokensMeet,
    nothing_moves,
    token_mesh,
)

log = logging.getLogger(__name__)

SUM = "sum"
Role = int | str | None
"""Of an operand or result: the dimension of its rows, SUM, or the same for all rows."""


class RowQuestions:
    """Asks, and remembers the answers."""

    def __init__(self, fake_mode: FakeTensorMode, device_type: str) -> None:
        self.fake_mode, self.device_type = fake_mode, device_type
        self._meshes: dict[int, DeviceMesh] = {}
        self._answers: dict[Any, list[Role] | None] = {}

    def roles(
        self, node: fx.Node, operands: Mapping[fx.Node, Role], rows: int
    ) -> list[Role] | None:
        """The roles of all results, or None if rows would have to move.

        Args:
            operands: those that are not the same for all rows, with their roles.
            rows: how many there are in this call. With one row a call proves nothing,
                but it may be equal to one that was proved.
        """
        key = _key(node, operands, rows)
        if key not in self._answers:
            if rows < _MANY:
                return None
            self._answers[key] = self._ask(node, operands, rows)
        return self._answers[key]

    def _ask(
        self, node: fx.Node, operands: Mapping[fx.Node, Role], rows: int
    ) -> list[Role] | None:
        target: Any = node.target
        if torch.Tag.nondeterministic_seeded in target.tags:
            return None
        if rows not in self._meshes:
            self._meshes[rows] = token_mesh(self.device_type, rows)
        mesh = self._meshes[rows]
        try:
            with nothing_moves(sums=False), self.fake_mode, torch.no_grad():
                args, kwargs = fx.node.map_arg(
                    (node.args, node.kwargs),
                    lambda x: _distributed(x.meta["val"], operands.get(x), mesh),
                )
                with enable_python_dispatcher():
                    result = target(*args, **kwargs)
        except REFUSALS as error:
            log.debug("%s of %s is not by rows: %s", node.target, operands, error)
            return None
        roles = [_role(x) for x in pytree.tree_leaves(result) if isinstance(x, DTensor)]
        return None if _UNKNOWN in roles else roles


# What DTensor's rules, and views of its local tensors, raise for what they cannot do.
REFUSALS = (TokensMeet, NotImplementedError, RuntimeError, ValueError, IndexError)
_MANY = 2
_UNKNOWN = "unknown"


def _key(node: fx.Node, operands: Mapping[fx.Node, Role], rows: int) -> Any:
    """Equal for calls that differ in the number of rows alone."""

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
    """What stands for a node in a key."""


def resized(target: Any, args: Any, dim: int | None, rows: int, to: int = -1) -> Any:
    """The arguments of a call with another number of rows in its sizes.

    dim: of the rows in the result; None stands for every dimension of this size.
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


def _distributed(value: Any, role: Role, mesh: DeviceMesh) -> Any:
    if not isinstance(value, Tensor):
        return value
    placement: Placement = Replicate()
    shape = list(value.shape)
    if role == SUM:
        placement = Partial()
    elif isinstance(role, int):
        placement = Shard(role)
        shape[role] //= mesh.size()
    strides = value.stride()
    order = sorted(range(value.ndim), key=lambda d: -strides[d])
    local = torch.empty_permuted(shape, order, dtype=value.dtype, device=value.device)
    return DTensor.from_local(
        local,
        mesh,
        [placement],
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def _role(x: DTensor) -> Role:
    (placement,) = x.placements
    if placement == Partial() and not must_not_wait(x):
        return SUM
    if isinstance(placement, Shard) and not placement.is_replicate():
        whole = x.shape[placement.dim] == x.device_mesh.size()
        return placement.dim if whole else _UNKNOWN
    return None if placement.is_replicate() else _UNKNOWN
