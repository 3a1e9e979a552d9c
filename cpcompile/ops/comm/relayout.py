"""cp::relayout: move the tokens of a sequence from one layout to another.

    tokens in `source` -> those that stay on their rank: copied -> tokens in `target`
                          all others: one all-to-all

What goes from one rank to another is in the order of the positions, so both ends know
which token is which (Note [Layouts]). The gradient is the way back.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from cpcompile.geometry.layout import Layout, TokenLayout
from cpcompile.ops.comm.communicating import goes_back_by
from cpcompile.ops.comm.communication import as_bytes, call_site, group_by_name


@dataclass(frozen=True)
class Share:
    """The tokens of one rank in one layout, by where they are in another one.

    stays: local indices of the tokens that are on the same rank there, int64.
    moves: local indices of the others, by the rank they are on there, int64.
    counts: how many of `moves` are on each rank.
    """

    stays: Tensor
    moves: Tensor
    counts: list[int]


@functools.lru_cache(maxsize=64)
def share(
    here: Layout,
    there: Layout,
    length: int,
    ranks: int,
    rank: int,
    device: torch.device,
) -> Share:
    """Sort what `rank` holds in layout `here` by where it is in `there`.

    The two shares of a pair of layouts are what a rank sends and what it receives. In
    both, tokens of one rank are in the order of their positions.
    """
    other = TokenLayout.of(there, length, ranks)
    owners = torch.empty(length, dtype=torch.int64)
    for peer in range(ranks):
        owners[other.positions(peer)] = peer
    owner = owners[TokenLayout.of(here, length, ranks).positions(rank)]
    order = owner.argsort(stable=True)
    moved = owner[order] != rank
    counts = owner[owner != rank].bincount(minlength=ranks)
    return Share(order[~moved].to(device), order[moved].to(device), counts.tolist())


@torch.library.custom_op("cp::relayout", mutates_args=())
def relayout(
    x: Tensor, dim: int, length: int, source: str, target: str, group: str
) -> Tensor:
    """Return this rank's tokens in layout `target`, from its tokens in layout `source`.

    Args:
        x: [.., local tokens, ..], of any dtype that torch can index by tensors.
        dim: the dimension of the tokens.
        length: tokens that the ranks of the group hold together, equal on every rank.
        source, target: values of `Layout`.
        group: name of the process group.

    Returns: a new contiguous tensor of the shape of x.

    Raises: ValueError for another number of tokens, a layout or a dim that does not
    exist; torch's error with a note if the exchange fails.
    """
    before, after = _layouts(x, dim, source, target)
    pg = group_by_name(group)
    ranks, rank = pg.size(), pg.rank()
    _check_tokens(x, dim, TokenLayout.of(before, length, ranks), rank)
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    if before is after or ranks == 1:  # one rank holds all in order, in every layout
        return result.copy_(x)
    leaving = share(before, after, length, ranks, rank, x.device)
    arriving = share(after, before, length, ranks, rank, x.device)
    old, new = x.movedim(dim, 0), result.movedim(dim, 0)
    sent = old.index_select(0, leaving.moves)
    received = torch.empty_like(sent)  # as many come as leave
    where = f"cp::relayout from {source} to {target} on rank {rank} of {ranks} in group"
    with call_site(f"{where} {group!r}"):
        work = dist.all_to_all_single(
            as_bytes(received),
            as_bytes(sent),
            arriving.counts,
            leaving.counts,
            group=pg,
            async_op=True,
        )
        new[arriving.stays] = old.index_select(0, leaving.stays)
        work.wait()
    new[arriving.moves] = received
    return result


@relayout.register_fake
def _(x: Tensor, dim: int, length: int, source: str, target: str, group: str) -> Tensor:
    _layouts(x, dim, source, target)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


goes_back_by(
    relayout,
    lambda grad, _, dim, length, source, target, group: relayout(
        grad, dim, length, target, source, group
    ),
)


def _layouts(x: Tensor, dim: int, source: str, target: str) -> tuple[Layout, Layout]:
    """Return the two layouts, after a look at what needs no group."""
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"cp::relayout: got dim {dim} of a tensor {tuple(x.shape)}; needed one of "
            f"its {x.ndim} dimensions. Pass the one of the tokens"
        )
    names = [layout.value for layout in Layout]
    for name in (source, target):
        if name not in names:
            raise ValueError(
                f"cp::relayout: got layout {name!r}; needed one of {', '.join(names)}. "
                "Pass the value of a Layout"
            )
    return Layout(source), Layout(target)


def _check_tokens(x: Tensor, dim: int, tokens: TokenLayout, rank: int) -> None:
    count = tokens.count(rank)
    if x.shape[dim] != count:
        raise ValueError(
            f"cp::relayout: got a tensor {tuple(x.shape)} with {x.shape[dim]} tokens "
            f"on dim {dim}, of a sequence of {tokens.length} on rank {rank} of "
            f"{tokens.ranks}; needed {count} tokens. Pass as many as torch.chunk "
            "deals out, or a DTensor sharded on that dim"
        )
