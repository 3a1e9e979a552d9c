"""cp::moved_tokens: a sequence that is made of tokens of others, on all ranks.

    x[:, 1:] on 2 ranks     0 1 2 3 | 4 5 6 7   ->   1 2 3 4 | 5 6 7

Slices, shifts, padding, joined sequences and assignments to a range are lists of pieces
(geometry/token_pieces.py). A rank copies what it has already; only tokens that are
elsewhere before are sent, in one all-to-all. The gradient goes the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cpcompile.geometry.layout import BatchRows, Layout, TokenLayout
from cpcompile.geometry.token_pieces import Move, Piece, move_of
from cpcompile.ops.comm.communicating import goes_back_by
from cpcompile.ops.comm.communication import as_bytes, call_site, group_by_name
from cpcompile.ops.step.math_attention import accumulation_dtype

WHOLE = "whole"
"""In place of a layout: every rank has the whole sequence."""
_FIELDS = len(Piece._fields)


@torch.library.custom_op("cp::moved_tokens", mutates_args=())
def moved_tokens(
    xs: Sequence[Tensor],
    dim: int,
    lengths: Sequence[int],
    layouts: str,
    pieces: Sequence[int],
    length: int,
    fill: float,
    group: str,
) -> Tensor:
    """Return this rank's tokens of a sequence that is made of others.

    Args:
        xs: [.., local tokens, ..], this rank's part of each source; of one dtype, and
            equal but for the tokens.
        dim: the dimension of the tokens, counted from 0.
        lengths: the tokens of each source on all ranks together.
        layouts: the layouts of the sources and of the result, by their names, with
            spaces; "whole" for a source that every rank has in whole, "contiguous*2"
            for the rows of two sequences, see BatchRows.
        pieces: the fields of one Piece after the other, equal on every rank.
        length: the tokens of the result on all ranks together.
        fill: the number of pieces that have no source.
        group: name of the process group.

    Returns: [.., local tokens, ..], contiguous.

    Raises: ValueError for another number of tokens; torch's error with a note if the
    exchange fails.
    """
    pg = group_by_name(group)
    move = plan(lengths, layouts, pieces, length, pg.size(), pg.rank(), xs[0].device)
    *counts, count = _local_counts(layouts, [*lengths, length], pg.size(), pg.rank())
    _check(xs, dim, lengths, layouts, counts, pg.rank())
    result = _with_tokens(xs[0], dim, count)
    if len(move.filled):
        result.index_fill_(dim, move.filled, fill)
    sent = _buffer(xs[0], dim, sum(move.sent))
    for x, copies in zip(xs, move.leaving, strict=True):
        copies.copy(x.movedim(dim, 0), sent, 0)
    received, work = _exchange(sent, move.sent, move.received, move, group, "")
    for x, copies in zip(xs, move.kept, strict=True):
        copies.copy(x, result, dim)
    if work is not None:
        work.wait()
        move.arriving.copy(received, result.movedim(dim, 0), 0)
    return result


@torch.library.custom_op("cp::moved_tokens_backward", mutates_args=())
def moved_tokens_backward(
    grad: Tensor,
    dim: int,
    lengths: Sequence[int],
    layouts: str,
    pieces: Sequence[int],
    length: int,
    group: str,
) -> list[Tensor]:
    """Compute the gradients of the sources, from that of the result.

    That of a source that every rank has in whole is this rank's summand.
    """
    if grad.element_size() == 1:  # float8: torch adds no such numbers
        wide = moved_tokens_backward(
            grad.float(), dim, lengths, layouts, pieces, length, group
        )
        return [x.to(grad.dtype) for x in wide]
    pg = group_by_name(group)
    move = plan(lengths, layouts, pieces, length, pg.size(), pg.rank(), grad.device)
    sent = _buffer(grad, dim, sum(move.received))
    move.arriving.add_back(grad.movedim(dim, 0), sent.zero_(), 0)
    came, work = _exchange(
        sent, move.received, move.sent, move, group, "the gradient of "
    )
    results = []
    counts = _local_counts(_of_sources(layouts), lengths, pg.size(), pg.rank())
    for count, copies, repeats in zip(counts, move.kept, move.repeats, strict=True):
        # Several summands of one token are rounded once.
        dtype = accumulation_dtype(grad.dtype) if repeats else grad.dtype
        results.append(_with_tokens(grad, dim, count, dtype).zero_())
        copies.add_back(grad, results[-1], dim)
    if work is not None:
        work.wait()
        for result, copies in zip(results, move.leaving, strict=True):
            copies.add_back(came, result.movedim(dim, 0), 0)
    return [x.to(grad.dtype) for x in results]


def plan(
    lengths: Sequence[int],
    layouts: str,
    pieces: Sequence[int],
    length: int,
    ranks: int,
    rank: int,
    device: torch.device,
) -> Move:
    """Return what a rank does; arguments as of cp::moved_tokens."""
    *sources, result = _layouts(layouts, [*lengths, length], ranks)
    assert result is not None
    rows = [pieces[i : i + _FIELDS] for i in range(0, len(pieces), _FIELDS)]
    parts = tuple(Piece(*row) for row in rows)
    return move_of(tuple(sources), parts, result, rank, device)


def _layouts(
    names: str, lengths: Sequence[int], ranks: int
) -> list[TokenLayout | BatchRows | None]:
    """Return what the names of layouts say, of as many tokens each."""
    found: list[TokenLayout | BatchRows | None] = []
    for name, length in zip(names.split(), lengths, strict=True):
        layout, _, sequences = name.partition("*")
        if layout == WHOLE:
            found.append(None)
        elif sequences:
            batch = int(sequences)
            tokens = TokenLayout.of(Layout(layout), length // batch, ranks)
            found.append(BatchRows(tokens, batch))
        else:
            found.append(TokenLayout.of(Layout(layout), length, ranks))
    return found


def _local_counts(
    names: str, lengths: Sequence[int], ranks: int, rank: int
) -> list[int]:
    """Return the tokens that a rank has of each."""
    layouts = _layouts(names, lengths, ranks)
    return [
        n if layout is None else layout.count(rank)
        for n, layout in zip(lengths, layouts, strict=True)
    ]


def _of_sources(layouts: str) -> str:
    return layouts.rpartition(" ")[0]


def _with_tokens(
    x: Tensor, dim: int, count: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Make a tensor like x, but for the tokens."""
    shape = list(x.shape)
    shape[dim] = count
    return x.new_empty(shape, dtype=dtype or x.dtype)


def _buffer(x: Tensor, dim: int, tokens: int) -> Tensor:
    """Make a buffer of tokens of x, [tokens, ..]."""
    return x.new_empty((tokens, *x.shape[:dim], *x.shape[dim + 1 :]))


def _exchange(
    sent: Tensor,
    leaving: list[int],
    coming: list[int],
    move: Move,
    group: str,
    what: str,
) -> tuple[Tensor, Any]:
    """Begin to exchange tokens; return where they come, and what to wait for."""
    received = sent.new_empty((sum(coming), *sent.shape[1:]))
    if move.is_local:
        return received, None
    pg = group_by_name(group)
    where = f"{what}cp::moved_tokens on rank {pg.rank()} of {pg.size()} in group"
    with call_site(f"{where} {group!r}"):
        work = dist.all_to_all_single(
            as_bytes(received),
            as_bytes(sent),
            coming,
            leaving,
            group=pg,
            async_op=True,
        )
    return received, work


def _check(
    xs: Sequence[Tensor],
    dim: int,
    lengths: Sequence[int],
    layouts: str,
    counts: Sequence[int],
    rank: int,
) -> None:
    for x, count in zip(xs, counts, strict=True):
        if not 0 <= dim < x.ndim or x.shape[dim] != count:
            raise ValueError(
                f"cp::moved_tokens: got a source {tuple(x.shape)} and dim {dim} on "
                f"rank {rank}, with lengths {list(lengths)} in layouts {layouts!r}; "
                f"needed {count} tokens on that dim. Pass as many as torch.chunk deals "
                "out"
            )


@moved_tokens.register_fake
def _(xs: Sequence[Tensor], dim: int, *rest: Any) -> Tensor:
    _, layouts, _, length, _, group = rest
    pg = group_by_name(group)
    result = layouts.split()[-1]
    (count,) = _local_counts(result, [length], pg.size(), pg.rank())
    return _with_tokens(xs[0], dim, count)


@moved_tokens_backward.register_fake
def _(
    grad: Tensor, dim: int, lengths: Sequence[int], layouts: str, *rest: Any
) -> list[Tensor]:
    pg = group_by_name(rest[-1])
    counts = _local_counts(_of_sources(layouts), lengths, pg.size(), pg.rank())
    return [_with_tokens(grad, dim, count) for count in counts]


def _way_back(grad: Tensor, _: list[torch.Size], *rest: Any) -> Any:
    *of_backward, _fill, group = rest
    return moved_tokens_backward(grad, *of_backward, group)


goes_back_by(moved_tokens, _way_back)
