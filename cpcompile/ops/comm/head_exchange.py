"""cp::ulysses_scatter, cp::ulysses_gather: from tokens to heads and back.

    scatter   [B, heads, local tokens, dim] -> [B, heads per rank, all tokens, dim]
    gather    the other way; the gradient of each is the other

All tensors of a call travel in one all-to-all: a row of the buffer goes to one rank and
has one block per tensor, [B, heads per rank, chunk size, dim], padded with zeros where
heads or tokens are missing. They are copied once into it and once out of it.

Key heads that several ranks read are sent to each, see HeadSplit; their gradients are
summed in the accumulation dtype. Method: Jacobs et al., DeepSpeed Ulysses (arXiv
2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cpcompile.geometry.head_split import HeadSplit
from cpcompile.geometry.layout import Runs
from cpcompile.ops.comm.communicating import goes_back_by
from cpcompile.ops.comm.communication import call_site, group_by_name
from cpcompile.ops.step.math_attention import accumulation_dtype
from cpcompile.ops.traced_nodes import sharing

Grid = tuple[tuple[int, ...], bool]  # a shape, and whether zeros remain in it
Results = tuple[Tensor, Tensor | None]  # out, and its log-sum-exp if that is wanted


@dataclass(frozen=True)
class HeadBlock:
    """What one tensor is in an exchange, over all ranks of the group.

    query_heads: heads of the queries that read its heads; HeadSplit says by both where
        a head goes.
    heads, length, dim: of the whole tensor [batch, heads, length, dim].
    size: tokens of a chunk; rank r holds the r-th one, or what is left.
    """

    query_heads: int
    heads: int
    length: int
    size: int
    dim: int

    @classmethod
    def read(cls, numbers: Sequence[int]) -> list[HeadBlock]:
        """Make blocks of their fields, as operators take them."""
        count = len(fields(cls))
        starts = range(0, len(numbers), count)
        return [cls(*numbers[start : start + count]) for start in starts]

    def split(self, ranks: int) -> HeadSplit:
        """Say where its heads go."""
        return HeadSplit(self.query_heads, self.heads, ranks)

    def of_heads(self, batch: int, ranks: int) -> tuple[int, ...]:
        """Return the shape of the heads of a rank."""
        return batch, self.split(ranks).kv_per_rank, self.length, self.dim

    def of_tokens(self, batch: int, ranks: int, rank: int) -> tuple[int, ...]:
        """Return the shape of the tokens of a rank."""
        tokens = Runs(self.length, ranks, self.size).count(rank)
        return batch, self.heads, tokens, self.dim

    def grid(self, batch: int, ranks: int, padded: bool) -> Grid:
        """Return its blocks in the rows of a buffer."""
        count = self.split(ranks).kv_per_rank
        return (ranks, batch, count, self.size, self.dim), padded


def pack_tokens(
    name: str, tensors: Sequence[Tensor], blocks: Sequence[HeadBlock], group: str
) -> Tensor:
    """Copy the tokens of this rank, of all heads, into the rows of a buffer.

    Raises: ValueError in the name of the operator for tensors that are no such tokens.
    """
    pg = group_by_name(group)
    ranks, rank = pg.size(), pg.rank()
    grids: list[Grid] = []
    for x, block in zip(tensors, blocks, strict=True):
        count = Runs(block.length, ranks, block.size).count(rank)
        _check_tokens(name, x, count, rank, ranks)
        split = block.split(ranks)
        padded = count < block.size or split.places < split.kv_per_rank * ranks
        grids.append(block.grid(x.shape[0], ranks, padded))
    buffer, views = _rows(tensors[0], grids)
    for x, grid, block in zip(tensors, views, blocks, strict=True):
        copies = block.split(ranks).copies
        if copies > 1:
            x = x.unsqueeze(2).expand(-1, -1, copies, -1, -1).flatten(1, 2)
        for part, own in _pieces(grid.narrow(3, 0, x.shape[2]), x, 1):
            part.copy_(own)
    return buffer


def unpack_heads(
    received: Tensor, batch: int, blocks: Sequence[HeadBlock], group: str
) -> list[Tensor]:
    """Copy all tokens of this rank's heads out of the rows that came."""
    ranks = group_by_name(group).size()
    grids = [block.grid(batch, ranks, padded=False) for block in blocks]
    results = empty_heads(received, batch, blocks, group)
    for grid, whole in zip(_views(received, grids), results, strict=True):
        for part, own in _pieces(grid, whole, 2):
            own.copy_(part)
    return results


def empty_heads(
    like: Tensor, batch: int, blocks: Sequence[HeadBlock], group: str
) -> list[Tensor]:
    """Make tensors of the shapes that unpack_heads returns."""
    ranks = group_by_name(group).size()
    return [like.new_empty(block.of_heads(batch, ranks)) for block in blocks]


def empty_tokens(
    like: Tensor, batch: int, blocks: Sequence[HeadBlock], group: str
) -> list[Tensor]:
    """Make tensors of the shapes that unpack_tokens returns."""
    pg = group_by_name(group)
    shapes = [block.of_tokens(batch, pg.size(), pg.rank()) for block in blocks]
    return [like.new_empty(shape) for shape in shapes]


def pack_heads(
    name: str, tensors: Sequence[Tensor], blocks: Sequence[HeadBlock], group: str
) -> Tensor:
    """Copy all tokens of this rank's heads into the rows of a buffer.

    Raises: ValueError in the name of the operator for tensors that are no such heads.
    """
    pg = group_by_name(group)
    ranks, rank = pg.size(), pg.rank()
    grids = []
    for x, block in zip(tensors, blocks, strict=True):
        _check_tokens(name, x, block.length, rank, ranks)
        padded = block.length != block.size * ranks
        grids.append(block.grid(x.shape[0], ranks, padded))
    buffer, views = _rows(tensors[0], grids)
    for x, grid in zip(tensors, views, strict=True):
        for part, whole in _pieces(grid, x, 2):
            part.copy_(whole)
    return buffer


def unpack_tokens(
    received: Tensor, batch: int, blocks: Sequence[HeadBlock], group: str
) -> list[Tensor]:
    """Copy this rank's tokens of all heads out of the rows; sum copies of a head."""
    pg = group_by_name(group)
    ranks, rank = pg.size(), pg.rank()
    grids = [block.grid(batch, ranks, padded=False) for block in blocks]
    results = []
    for grid, block in zip(_views(received, grids), blocks, strict=True):
        split = block.split(ranks)
        *_, count, dim = block.of_tokens(batch, ranks, rank)
        several = split.copies > 1
        dtype = accumulation_dtype(grid.dtype) if several else grid.dtype
        own = grid.new_empty((batch, split.places, count, dim), dtype=dtype)
        for part, piece in _pieces(grid.narrow(3, 0, count), own, 1):
            piece.copy_(part)
        if several:
            own = own.unflatten(1, (split.kv_heads, split.copies)).sum(2)
            own = own.to(grid.dtype)
        results.append(own)
    return results


@torch.library.custom_op("cp::ulysses_scatter", mutates_args=())
def ulysses_scatter(
    tensors: Sequence[Tensor], lengths: Sequence[int], sizes: Sequence[int], group: str
) -> list[Tensor]:
    """Exchange this rank's tokens of all heads for all tokens of this rank's heads.

    Args:
        tensors: [B, heads, local tokens, dim] each, of one dtype; the first one holds
            the queries, whose heads are a multiple of the heads of each other one.
        lengths: tokens of each that the ranks of the group hold together.
        sizes: tokens of a chunk of each; rank r holds the r-th chunk, or what is left.
        group: name of the process group.

    Returns: [B, heads per rank, length, dim] each, contiguous; missing heads are zero.

    Raises: ValueError for tensors that are not such chunks; torch's error with a note
    if the exchange fails.
    """
    name, batch = "cp::ulysses_scatter", tensors[0].shape[0]
    blocks = _blocks(tensors, [x.shape[1] for x in tensors], lengths, sizes)
    received = _exchange(pack_tokens(name, tensors, blocks, group), group, name)
    return unpack_heads(received, batch, blocks, group)


@ulysses_scatter.register_fake
def _(tensors: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    lengths, sizes, group = rest
    blocks = _blocks(tensors, [x.shape[1] for x in tensors], lengths, sizes)
    return empty_heads(tensors[0], tensors[0].shape[0], blocks, group)


@torch.library.custom_op("cp::ulysses_gather", mutates_args=())
def ulysses_gather(
    tensors: Sequence[Tensor],
    heads: Sequence[int],
    lengths: Sequence[int],
    sizes: Sequence[int],
    group: str,
) -> list[Tensor]:
    """Undo cp::ulysses_scatter, and sum copies of a head.

    Args:
        tensors: [B, heads per rank, length, dim] each, of one dtype.
        heads: how many each whole tensor has; the first number is that of the queries.
        lengths, sizes, group: those of the scatter.

    Returns: [B, heads, local tokens, dim] each, contiguous.

    Raises: ValueError for other numbers of tokens; torch's error with a note if the
    exchange fails.
    """
    name, batch = "cp::ulysses_gather", tensors[0].shape[0]
    blocks = _blocks(tensors, heads, lengths, sizes)
    received = _exchange(pack_heads(name, tensors, blocks, group), group, name)
    return unpack_tokens(received, batch, blocks, group)


@ulysses_gather.register_fake
def _(tensors: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    *told, group = rest
    blocks = _blocks(tensors, *told)
    return empty_tokens(tensors[0], tensors[0].shape[0], blocks, group)


def _blocks(
    tensors: Sequence[Tensor],
    heads: Sequence[int],
    lengths: Sequence[int],
    sizes: Sequence[int],
) -> list[HeadBlock]:
    """Describe tensors, the first of which holds the queries."""
    dims = [x.shape[3] for x in tensors]
    rows = zip(heads, lengths, sizes, dims, strict=True)
    return [HeadBlock(heads[0], *row) for row in rows]


goes_back_by(
    ulysses_scatter,
    lambda grads, shapes, *rest: ulysses_gather(grads, [x[1] for x in shapes], *rest),
)
goes_back_by(
    ulysses_gather, lambda grads, _, heads, *rest: ulysses_scatter(grads, *rest)
)


def with_exchanged_heads(
    attend: Callable[[Tensor, Tensor, Tensor], Results],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, int],
    sizes: tuple[int, int],
    group: str,
) -> Results:
    """Run `attend(q, k, v)` on all tokens of this rank's heads; return its own tokens.

    lengths, sizes: of cp::ulysses_scatter, for the queries and for the keys.
    """
    (q_len, kv_len), (q_size, kv_size), heads = lengths, sizes, q.shape[1]
    q, k, v = ulysses_scatter(
        [q, k, v], [q_len, kv_len, kv_len], [q_size, kv_size, kv_size], group
    )
    with sharing(heads / max(q.shape[1], 1)):
        out, lse = attend(q, k, v)

    def own_tokens(results: list[Tensor]) -> list[Tensor]:
        n = len(results)
        gathered: list[Tensor] = ulysses_gather(
            results, [heads] * n, [q_len] * n, [q_size] * n, group
        )
        return gathered

    if lse is None:
        return own_tokens([out])[0], None
    results = [out, lse.unsqueeze(-1)]
    if lse.dtype == out.dtype:  # one message for both
        out, lse = own_tokens(results)
    else:
        (out,), (lse,) = (own_tokens([x]) for x in results)
    return out, lse.squeeze(-1)


def _rows(like: Tensor, grids: list[Grid]) -> tuple[Tensor, list[Tensor]]:
    """Make a buffer with one row per rank; return it and the tensors' blocks in it."""
    ranks = grids[0][0][0]
    numel = sum(torch.Size(shape).numel() for shape, _ in grids) // ranks
    make = like.new_zeros if any(padded for _, padded in grids) else like.new_empty
    buffer = make(ranks, numel)
    return buffer, _views(buffer, grids)


def _views(buffer: Tensor, grids: list[Grid]) -> list[Tensor]:
    parts = [torch.Size(shape[1:]).numel() for shape, _ in grids]
    return [
        block.unflatten(1, shape[1:])
        for block, (shape, _) in zip(buffer.split(parts, 1), grids, strict=True)
    ]


def _pieces(grid: Tensor, whole: Tensor, dim: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of views that hold the same.

    Row r of `grid` is part r of `whole` on `dim`. Rows past the end of `whole`, and the
    rest of the last one, have no counterpart.
    """
    if whole.numel() == 0 or grid.numel() == 0:
        return
    size = grid.shape[dim + 1]
    full, rest = divmod(whole.shape[dim], size)
    if full:
        parts = whole.narrow(dim, 0, full * size).unflatten(dim, (full, size))
        yield grid[:full], parts.movedim(dim, 0)
    if rest:
        yield grid[full].narrow(dim, 0, rest), whole.narrow(dim, full * size, rest)


def _exchange(buffer: Tensor, group: str, name: str) -> Tensor:
    """Send row r to rank r; return the rows that came, in the order of the ranks."""
    pg = group_by_name(group)
    if pg.size() == 1:
        return buffer
    received = torch.empty_like(buffer)
    with call_site(place(name, group)):
        dist.all_to_all_single(received, buffer, group=pg)
    return received


def place(name: str, group: str) -> str:
    """Say where an exchange runs."""
    pg = group_by_name(group)
    return f"{name} on rank {pg.rank()} of {pg.size()} in group {group!r}"


def _check_tokens(name: str, x: Tensor, count: int, rank: int, ranks: int) -> None:
    if x.shape[2] != count:
        raise ValueError(
            f"{name}: got a tensor {tuple(x.shape)} [batch, heads, tokens, dim] on "
            f"rank {rank} of {ranks}; needed {count} tokens. Pass the chunks of the "
            "contiguous layout"
        )
