"""Programs of rows, such as the experts of tokens, on the rows of a rank.

    cp_row_parallel(moe_dispatch, hidden, ids, experts)
      ->
    by_rows([hidden, ids, experts], "moe_dispatch 5f2a..")     what AOTAutograd traces
      ->
    the calls of the program on [19, 8] of [37, 8]             what localise writes

A rank runs forward and backward on its own rows: gradients of what all rows share, and
counts, are sums over the ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from cpcompile.ops.by_rows import (
    BY_ROWS,
    BY_ROWS_BACKWARD,
    gradients_of,
    known_as,
    program_of,
    results_of,
)
from cpcompile.ops.dtensor.local_part import contiguous_strides
from cpcompile.torch_private.distributed import DTensorSpec, TensorMeta

from ..model.moe.region_call import RowProgram
from .cut_alike import cut_as, local_of, placements_of, shared_rows
from .local_calls import replicated
from .reduced_tokens import summed
from .token_order import TokenOrder

_DEVICES = ("cpu", "cuda")


def run_kept(program: RowProgram, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Run a program as one operator, under the autocast of this place."""
    dtypes = [
        torch.get_autocast_dtype(x) if torch.is_autocast_enabled(x) else None
        for x in _DEVICES
    ]
    kept = _Kept(program, tuple(dtypes))
    digest = hashlib.sha256(f"{program.text()} {dtypes}".encode()).hexdigest()
    return tuple(BY_ROWS(list(tensors), known_as(kept, f"{program.name} {digest}")))


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A program, and the dtype of autocast on each device."""

    program: RowProgram
    dtypes: tuple[torch.dtype | None, ...]

    @property
    def arguments(self) -> tuple[bool, ...]:
        return self.program.arguments

    @property
    def results(self) -> tuple[bool, ...]:
        return self.program.results

    def run(self, rows: int, *tensors: Tensor) -> Any:
        with ExitStack() as stack:
            for device, dtype in zip(_DEVICES, self.dtypes, strict=True):
                on = dtype is not None
                stack.enter_context(torch.autocast(device, dtype, enabled=on))
            return self.program.run(rows, *tensors)


def _by_rows(order: TokenOrder, tensors: Sequence[Any], name: str) -> list[DTensor]:
    program = program_of(name)
    like = _cut_rows(tensors, program.arguments)
    local = _brought(tensors, program.arguments, like, order)
    with shared_rows(like, 0):
        results = results_of(program, local, traced=True)
    # Counts that wait would be divided before they are added up.
    return [summed(x) for x in _placed(results, program.results, like)]


def _by_rows_backward(
    order: TokenOrder,
    grads: Sequence[Any],
    tensors: Sequence[Any],
    graded: Sequence[int],
    needed: Sequence[int],
    name: str,
) -> list[DTensor]:
    program = program_of(name)
    like = _cut_rows(tensors, program.arguments)
    local = _brought(tensors, program.arguments, like, order)
    of_rows = [program.results[i] for i in graded]
    own = _brought(grads, of_rows, like, order)
    with shared_rows(like, 0):
        found = gradients_of(program, own, local, graded, needed, traced=True)
    return _placed(found, [program.arguments[i] for i in needed], like)


def _cut_rows(tensors: Sequence[Any], arguments: Sequence[bool]) -> DTensor:
    """Return an argument whose rows are cut over ranks, or one that is whole."""
    rows = [x for x, has_rows in zip(tensors, arguments, strict=True) if has_rows]
    for x in rows:
        if any(getattr(p, "dim", None) == 0 for p in placements_of(x)):
            return x  # type: ignore[no-any-return]
    (mesh, *_) = (x.device_mesh for x in tensors if isinstance(x, DTensor))
    (first, *_) = rows
    if not isinstance(first, DTensor):
        return replicated(first, mesh)
    return first.redistribute(placements=[Replicate()] * mesh.ndim)


def _brought(
    tensors: Sequence[Any],
    have_rows: Sequence[bool],
    like: DTensor,
    order: TokenOrder,
) -> list[Tensor]:
    """Return this rank's rows of tensors, and all of those that have none."""
    found = []
    for x, has_rows in zip(tensors, have_rows, strict=True):
        if not has_rows or placements_of(x) != like.placements:
            if isinstance(x, DTensor):
                x = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)
            x = _rows_of(x, like, order) if has_rows else x
        found.append(local_of(x))
    return found


def _rows_of(x: Any, like: DTensor, order: TokenOrder) -> Any:
    """Cut the rows of x, of any number of dimensions, as those of `like`."""
    shape = torch.Size([like.shape[0], *[1] * (x.ndim - 1)])
    meta = TensorMeta(shape, contiguous_strides(shape), like.dtype)
    spec = dataclasses.replace(like._spec, tensor_meta=meta)
    model = DTensor(like._local_tensor, spec, requires_grad=False)
    return cut_as(x, model, order)


def _placed(
    results: Sequence[Tensor], have_rows: Sequence[bool], like: DTensor
) -> list[DTensor]:
    placed = []
    for x, has_rows in zip(results, have_rows, strict=True):
        shape = (
            torch.Size([like.shape[0] if has_rows else x.shape[0], *x.shape[1:]])
            if x.ndim
            else x.shape
        )
        meta = TensorMeta(shape, contiguous_strides(shape), x.dtype)
        if has_rows:
            spec = dataclasses.replace(like._spec, tensor_meta=meta)
        else:
            cut = (p.is_replicate() for p in like.placements)
            sums = tuple(Replicate() if whole else Partial() for whole in cut)
            spec = DTensorSpec(like.device_mesh, sums, tensor_meta=meta)
        placed.append(DTensor(x.contiguous(), spec, requires_grad=False))
    return placed


def row_rules(order: TokenOrder) -> dict[Any, Callable[..., Any]]:
    """Return the rules, by call, for tokens in one order."""
    rules: dict[Any, Callable[..., Any]] = {
        BY_ROWS: _by_rows,
        BY_ROWS_BACKWARD: _by_rows_backward,
    }
    return {call: partial(rule, order) for call, rule in rules.items()}
