"""Pick a few tokens of a sharded sequence: each rank gives what it has, for a sum.

    x[:, -1]    x[arange(B), lengths - 1]    x.gather(1, index)    x[:, :4]

The result is the same on every rank. It is as small as what is picked, whatever the
length of the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from cpcompile.geometry.layout import BatchRows, Layout, TokenLayout
from cpcompile.geometry.token_pieces import sliced
from cpcompile.torch_private.distributed import StridedShard

from ..graph.constant_arguments import MeshAxis


def cp_pick_tokens(
    x: DTensor,
    cp_axis: MeshAxis,
    dim: int,
    items: tuple[Any, ...],
    layout: str = Layout.CONTIGUOUS.value,
) -> Tensor:
    """Return x[items] on every rank, where an item picks tokens along `dim`.

    items: one for every dimension of x, numbers, slices and tensors of numbers; that of
    `dim` is a number or a tensor, or a slice of few tokens.

    Raises: as torch does, for a position that x has not; on GPUs an assertion of the
    device.
    """
    local, lies, valid = _own(x, cp_axis, dim, items[dim], layout)
    own_items = (*items[:dim], lies, *items[dim + 1 :])
    advanced = [i for i, item in enumerate(own_items) if isinstance(item, Tensor | int)]
    block = torch.broadcast_shapes(
        *(item.shape for item in own_items if isinstance(item, Tensor))
    )
    # torch reads the value of an index without dimensions, which has no data here.
    own_items = tuple(x[None] if _is_number(x) else x for x in own_items)
    picked = local[own_items]
    adjacent = advanced == [*range(advanced[0], advanced[-1] + 1)]
    first = advanced[0] if adjacent else 0
    if not block:
        picked = picked.squeeze(first)
    after = [1] * (picked.ndim - first - len(block))
    mask = valid.expand(block).reshape([*block, *after])
    return _summed(picked, mask, x, cp_axis)


def _is_number(item: Any) -> bool:
    return isinstance(item, Tensor) and item.ndim == 0


def cp_gather_at(
    x: DTensor,
    cp_axis: MeshAxis,
    dim: int,
    index: Tensor,
    layout: str = Layout.CONTIGUOUS.value,
) -> Tensor:
    """Return x.gather(dim, index) on every rank, where `dim` has the tokens."""
    local, lies, valid = _own(x, cp_axis, dim, index, layout)
    picked = local.gather(dim, lies)
    return _summed(picked, valid, x, cp_axis)


def _own(
    x: DTensor, cp_axis: MeshAxis, dim: int, index: Tensor | slice | int, layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's tokens, which of them an index means, and whether it has any.

    Where it has none the first token stands for it.
    """
    length, rank = x.shape[dim], cp_axis.mesh.get_local_rank(cp_axis.axis)
    placement = x.placements[cp_axis.axis]
    batch: Any = placement.split_factor if isinstance(placement, StridedShard) else 1
    each = TokenLayout.of(Layout(layout), length // batch, cp_axis.size)
    tokens = each if batch == 1 else BatchRows(each, batch)
    count = tokens.count(rank)
    if isinstance(index, slice):
        (piece,), chosen = sliced(length, index.start, index.stop, index.step)
        whole = torch.arange(chosen, device=x.device) * piece.step + piece.start
    elif isinstance(index, int | torch.SymInt):
        position = index + length if index < 0 else index
        whole = torch.full((), position, dtype=torch.int64, device=x.device)
    else:
        whole = index.full_tensor() if isinstance(index, DTensor) else index
    # torch looks at the bounds, and counts negative numbers from the end.
    flat = whole.reshape(-1).long()  # torch gathers by other integers, too
    owner, place = (n.reshape(whole.shape) for n in tokens.places(flat))
    local = x._local_tensor
    if count == 0:  # ranks make the same calls
        local = F.pad(local, (0, 0) * (x.ndim - 1 - dim) + (0, 1))
    valid = owner == rank
    return local, torch.where(valid, place, 0), valid


def _summed(picked: Tensor, has: Tensor, x: DTensor, cp_axis: MeshAxis) -> Tensor:
    """Return on each rank what the rank has picked that has it."""
    everywhere: list[Placement] = [Replicate()] * cp_axis.mesh.ndim
    summed = list(everywhere)
    summed[cp_axis.axis] = Partial()
    if picked.element_size() == 1 and picked.dtype != torch.int8:  # no such numbers add
        wide = torch.float32 if picked.is_floating_point() else torch.uint8
        picked = picked.to(wide)
    own = torch.where(has, picked, picked.new_zeros(()))
    parts = DTensor.from_local(own, cp_axis.mesh, summed, run_check=False)
    return parts.redistribute(placements=everywhere).to(x.dtype)
