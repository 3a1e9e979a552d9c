"""Calls on rows of a flattened batch, of which DTensor has rules for one sequence only.

    topk(p [74, 4] of batch 2, 2)  ->  topk(p [38, 4], 2) on each rank

The rows of a rank are pieces of each batch entry. A call for which DTensor sends
nothing where the pieces are one, treats every row by itself or adds them up, and does
so here: it runs on the rows of a rank. Asked is for parts of equal sizes, so that all
ranks get the same answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from cpcompile.errors import RewriteError
from cpcompile.geometry.lengths import hashable
from cpcompile.ops.dtensor.local_part import contiguous_strides
from cpcompile.refusals import check_refusal
from cpcompile.torch_private import pytree
from cpcompile.torch_private.distributed import (
    DTensorSpec,
    MaskPartial,
    StridedShard,
    TensorMeta,
)
from cpcompile.torch_private.fake_tensors import TorchDispatchMode
from cpcompile.torch_private.operators import OpOverload

from .cut_alike import cut_as, local_of, placements_of, shared_rows
from .token_order import TokenOrder


class _SendsError(Exception):
    """Raised in place of a message."""


class _NoMessages(TorchDispatchMode):
    """A mode in which a call sends nothing.

    shapes: those of its local operands.
    """

    def __init__(self, call: OpOverload) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.call, self.shapes = call, list[torch.Size]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        if func.namespace in ("_c10d_functional", "_dtensor"):
            raise _SendsError
        if func is self.call:
            operands = pytree.tree_leaves((args, kwargs))
            self.shapes = [x.shape for x in operands if isinstance(x, Tensor)]
        return func(*args, **(kwargs or {}))


def by_rows_of_batch(call: OpOverload, order: TokenOrder) -> Callable[..., Any]:
    """Return `call`, on the rows of a rank where its operands are such rows.

    An operand that is whole is cut to them if DTensor cuts it to rows of one sequence.
    """
    if call is torch.ops.aten._assert_async.msg:
        return lambda x, message: call(local_of(x), message)  # each rank of its rows
    if call.is_view or any(x.name in _SIZES for x in call._schema.arguments):
        return call

    def rows(*args: Any, **options: Any) -> Any:
        leaves, tree = pytree.tree_flatten((args, options))
        cut = [x for x in leaves if _is_cut(x)]
        answer = _answer(call, leaves, tree, cut) if cut else None
        if answer is None:
            return call(*args, **options)
        placements, whole = answer
        for i in whole:
            leaves[i] = cut_as(leaves[i], cut[0], order)
        own, how = pytree.tree_unflatten([local_of(x) for x in leaves], tree)
        with shared_rows(cut[0], _rows_dim(cut[0])):
            results, structure = pytree.tree_flatten(call(*own, **how))
        placed = [
            _placed(x, of_x, cut[0])
            for x, of_x in zip(results, placements, strict=True)
        ]
        return pytree.tree_unflatten(placed, structure)

    return rows


def _is_cut(x: Any) -> bool:
    return any(isinstance(p, StridedShard) for p in placements_of(x))


def _answer(
    call: OpOverload, leaves: list[Any], tree: Any, cut: list[DTensor]
) -> tuple[list[tuple[Any, ...]], list[int]] | None:
    """Return the placements of the results, and which whole operands are to be cut.

    None if the call is to run as it is.
    """
    axes = {tuple(isinstance(p, StridedShard) for p in x.placements) for x in cut}
    others = [p for x in leaves for p in placements_of(x) if p.is_partial()]
    if len(axes) > 1 or others or len({_kind(x) for x in cut}) > 1:
        return None
    try:
        with disable_proxy_modes_tracing(), (mode := _NoMessages(call)):
            asked = [_stand_in(x) if isinstance(x, Tensor) else x for x in leaves]
            args, options = pytree.tree_unflatten(asked, tree)
            results = pytree.tree_leaves(call(*args, **options))
    except _SendsError:
        return None
    except Exception as error:  # whatever DTensor's rules raise
        check_refusal(error, f"{call} of rows")
        return None
    if not all(isinstance(x, DTensor) for x in results):
        return None
    found = [x.placements for x in results]
    if any(isinstance(p, MaskPartial) for placements in found for p in placements):
        raise RewriteError("rows of a flattened batch are looked up by their number")
    tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    if len(mode.shapes) != len(tensors):  # other calls in its place
        return (found, []) if len(tensors) == len(cut) else None
    given = [local_of(asked[i]).shape for i in tensors]
    pairs = zip(tensors, given, mode.shapes, strict=True)
    moved = [(i, x, y) for i, x, y in pairs if x != y]
    if not all(_is_cut_to(leaves[i], x, y, cut[0]) for i, x, y in moved):
        return None
    return found, [i for i, *_ in moved]


def _is_cut_to(x: Tensor, before: torch.Size, after: torch.Size, like: DTensor) -> bool:
    """Tell whether an operand that was whole was cut to rows, and to nothing else."""
    dim = _rows_dim(like)
    if _is_cut(x) or x.ndim != like.ndim or x.shape[dim] != like.shape[dim]:
        return False
    return [d for d, n in enumerate(after) if n != before[d]] == [dim]


def _stand_in(x: Tensor) -> Tensor:
    """Return x with rows of one sequence, as many on every rank."""
    sizes, placements = list(x.shape), placements_of(x)
    if not isinstance(x, DTensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    local, mesh = list(x.shape), x.device_mesh
    for axis, p in enumerate(placements):
        dim = getattr(p, "dim", None)
        if dim is not None:
            local[dim] = -(-local[dim] // mesh.size(axis))
            sizes[dim] = local[dim] * mesh.size(axis)
    plain = [Shard(p.dim) if isinstance(p, StridedShard) else p for p in placements]
    shape = torch.Size(sizes)
    meta = TensorMeta(shape, contiguous_strides(shape), x.dtype)
    spec = DTensorSpec(mesh, tuple(plain), tensor_meta=meta)
    part = torch.empty(local, dtype=x.dtype, device=x.device)
    return DTensor(part, spec, requires_grad=False)


def _placed(x: Tensor, placements: tuple[Any, ...], like: DTensor) -> DTensor:
    """Make a DTensor of a result on the rows of this rank."""
    pairs = zip(placements, like.placements, strict=True)
    pieces, sizes, strided = _pieces(like), list(x.shape), []
    for p, known in pairs:
        if isinstance(p, Shard) and isinstance(known, StridedShard):
            sizes[p.dim] = like.shape[_rows_dim(like)]
            p = StridedShard(p.dim, split_factor=pieces)
        strided.append(p)
    shape = torch.Size(sizes)
    meta = TensorMeta(shape, contiguous_strides(shape), x.dtype)
    spec = DTensorSpec(like.device_mesh, tuple(strided), tensor_meta=meta)
    if spec.placements == like.placements:  # it says how strided shards are read
        spec = dataclasses.replace(like._spec, tensor_meta=meta)
    return DTensor(x, spec, requires_grad=False)


def _pieces(x: DTensor) -> Any:
    return next(p.split_factor for p in x.placements if isinstance(p, StridedShard))


def _kind(x: DTensor) -> tuple[Any, object]:
    return _pieces(x), hashable(x.shape[_rows_dim(x)])


def _rows_dim(x: DTensor) -> int:
    (dim,) = {p.dim for p in x.placements if isinstance(p, StridedShard)}
    return dim


# Arguments that may be the number of all rows.
_SIZES = ("size", "sizes", "shape", "sym_size", "self_size", "input_sizes", "start")
