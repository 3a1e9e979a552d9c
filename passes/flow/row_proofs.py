"""Proves that a call does the same with every row of its arguments.

As token_wise, but nothing may move, not even a sum: what is proved may run on the rows
that a rank has, on plain tensors.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from cpcompile.refusals import check_refusal

from ..graph.calls import canonical_call
from ..graph.sequence_tokens import TokenDim, token_dim
from .permutation_proof import nothing_moves, token_mesh
from .shaped_calls import TensorShape, shaped_call
from .trial import RandomNumbers

log = logging.getLogger(__name__)

ROWS = TokenDim(0)


class RowProofs:
    """Asks DTensor, on a mesh with one rank per row, and remembers what it said."""

    def __init__(self, fake_mode: FakeTensorMode, device_type: str) -> None:
        self.fake_mode, self.device_type = fake_mode, device_type
        self._meshes: dict[int, DeviceMesh] = {}
        self._memory: dict[Any, bool] = {}

    def holds(self, node: fx.Node, cut: set[fx.Node], rows: int) -> bool:
        """Whether every result of the call is cut into `rows` rows if `cut` are.

        Rows are along dimension 0; all other arguments are the same on every rank.
        """
        one_hot = canonical_call(node)
        if one_hot.name == "one_hot" and one_hot.arguments["input"] in cut:
            # With -1 classes it looks for the largest.
            return bool(one_hot.arguments["num_classes"] != -1)
        call, leaves = shaped_call(node)
        split = [ROWS if isinstance(x, fx.Node) and x in cut else None for x in leaves]
        key = None if call.key is None else (call.key, tuple(split), rows)
        if key is None or key not in self._memory:
            found = self._ask(call, split, rows)
            if key is None:
                return found
            self._memory[key] = found
        return self._memory[key]

    def _ask(self, call: Any, split: list[TokenDim | None], rows: int) -> bool:
        for value, dim in zip(call.values, split, strict=True):
            if dim is not None and not _divides(rows, value):
                return False
        mesh = self._meshes.get(rows)
        if mesh is None:
            mesh = self._meshes[rows] = token_mesh(self.device_type, rows)
        random = RandomNumbers()  # type: ignore[no-untyped-call]
        try:
            with nothing_moves(sums=False), self.fake_mode, torch.no_grad(), random:
                result = call.on(mesh, split)
        except Exception as error:  # whatever DTensor's rules or views raise
            check_refusal(error, f"the proof that {call.target} is row-wise")
            log.debug("%s is not row-wise: %s", call.target, error)
            return False
        tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        cut = [token_dim(x, 0, rows) == ROWS for x in tensors]
        return bool(tensors) and all(cut) and not random.drawn


def _divides(rows: int, value: Any) -> bool:
    if not isinstance(value, TensorShape) or not value.shape:
        return False
    return value.shape[0] > 0 and value.shape[0] % rows == 0
