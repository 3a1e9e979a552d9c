"""cp::halo_exchange: the tokens beside a rank's own, from the ranks that have them.

    rank 1 of 3, before=2, after=1:   [ 2 3 | 4 5 6 7 | 8 ]   of 12 tokens

A convolution over the sequence reads some tokens before and after its own, its halo.
Where the sequence ends the halo is 0, as the padding of a convolution. The gradient
goes the way back, and is added to that of the tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from cpcompile.geometry.layout import Chunks
from cpcompile.ops.comm.communicating import goes_back_by
from cpcompile.ops.comm.communication import as_bytes, call_site, group_by_name
from cpcompile.ops.step.math_attention import accumulation_dtype


@torch.library.custom_op("cp::halo_exchange", mutates_args=())
def halo_exchange(
    x: Tensor, dim: int, length: int, before: int, after: int, group: str
) -> Tensor:
    """Return this rank's tokens between those before and after them.

    Args:
        x: [.., local tokens, ..], the rank's chunk of a sequence as torch.chunk deals
            it out.
        dim: the dimension of the tokens.
        length: tokens that the ranks of the group hold together, equal on every rank.
        before, after: how many tokens of others a rank needs; they may come from
            several ranks.
        group: name of the process group.

    Returns: [.., before + local tokens + after, ..], contiguous; 0 where there is no
    token, and everywhere on a rank that has no token itself.

    Raises: ValueError for another number of tokens; torch's error with a note if the
    exchange fails.
    """
    pg = group_by_name(group)
    rank, chunks = pg.rank(), Chunks(length, pg.size())
    own = chunks.count(rank)
    _check(x, dim, own, chunks, rank)
    shape = list(x.shape)
    shape[dim] = before + own + after
    result = x.new_zeros(shape)
    result.narrow(dim, before, own).copy_(x)
    taken = _exchange(x, dim, chunks, rank, (before, after), group, back=False)
    for place, count, part in _places(chunks, rank, before, after, taken):
        result.narrow(dim, place, count).copy_(part.movedim(0, dim))
    return result


@torch.library.custom_op("cp::halo_exchange_backward", mutates_args=())
def halo_exchange_backward(
    grad: Tensor, dim: int, length: int, before: int, after: int, group: str
) -> Tensor:
    """Compute the gradient of x, [.., local tokens, ..], from that of the result."""
    pg = group_by_name(group)
    rank, chunks = pg.rank(), Chunks(length, pg.size())
    own = chunks.count(rank)
    _check(grad, dim, before + own + after, chunks, rank)
    # A token may be in the halos of several ranks: the sum is rounded once.
    mine = grad.narrow(dim, before, own)
    result = torch.empty(
        mine.shape, dtype=accumulation_dtype(grad.dtype), device=grad.device
    )
    result.copy_(mine)
    came = _exchange(grad, dim, chunks, rank, (before, after), group, back=True)
    lent = [
        position - chunks.start(rank)
        for other in range(chunks.ranks)
        for run in _lent(chunks, rank, other, before, after)
        for position in run
    ]
    places = torch.tensor(lent, dtype=torch.int64, device=grad.device)
    lent_grads = came.movedim(0, dim).to(result.dtype)
    return result.index_add_(dim, places, lent_grads).to(grad.dtype)


def _exchange(
    x: Tensor,
    dim: int,
    chunks: Chunks,
    rank: int,
    halo: tuple[int, int],
    group: str,
    back: bool,
) -> Tensor:
    """Exchange tokens; return those of others in the halo, in order, [tokens, ..].

    back: x is a gradient with the halo; what comes are the gradients of the tokens that
    this rank has lent, from the ranks that borrowed them.
    """
    ranks = range(chunks.ranks)
    lent = [_lent(chunks, rank, other, *halo) for other in ranks]
    borrowed = [_lent(chunks, other, rank, *halo) for other in ranks]
    start = chunks.start(rank) - (halo[0] if back else 0)  # position of the first of x
    tokens = x.movedim(dim, 0)
    leaves = borrowed if back else lent
    parts = [
        tokens[run.start - start : run.stop - start] for runs in leaves for run in runs
    ]
    sent = torch.cat([tokens[:0], *parts]).contiguous()
    comes = lent if back else borrowed
    leaving, coming = ([sum(map(len, runs)) for runs in x] for x in (leaves, comes))
    received = sent.new_empty((sum(coming), *sent.shape[1:]))
    if chunks.ranks == 1:
        return received
    where = f"{'the gradient of ' if back else ''}cp::halo_exchange on rank {rank}"
    with call_site(f"{where} of {chunks.ranks} in group {group!r}"):
        dist.all_to_all_single(
            as_bytes(received),
            as_bytes(sent),
            coming,
            leaving,
            group=group_by_name(group),
        )
    return received


def tokens_received(
    chunks: Chunks, rank: int, halo: tuple[int, int], back: bool
) -> int:
    """Count the tokens that come to a rank, or their gradients on the way back."""
    ranks = range(chunks.ranks)
    pairs = [(rank, other) if back else (other, rank) for other in ranks]
    runs = [run for pair in pairs for run in _lent(chunks, *pair, *halo)]
    return sum(map(len, runs))


def _lent(
    chunks: Chunks, owner: int, reader: int, before: int, after: int
) -> list[range]:
    """Return positions of the tokens of `owner` that are in the halo of `reader`."""
    if owner == reader or not chunks.count(reader):
        return []
    start, stop = chunks.start(reader), chunks.start(reader + 1)
    first, last = chunks.start(owner), chunks.start(owner + 1)
    runs = (start - before, start), (stop, stop + after)
    lent = [range(max(a, first), min(b, last)) for a, b in runs]
    return [run for run in lent if run]


def _places(
    chunks: Chunks, rank: int, before: int, after: int, taken: Tensor
) -> list[tuple[int, int, Tensor]]:
    """Return (place, count, tokens) of each side of the halo; taken: [tokens, ..]."""
    start, stop = chunks.start(rank), chunks.start(rank + 1)
    early = min(before, start) if stop > start else 0
    late = len(taken) - early
    places = [(before - early, early), (before + stop - start, late)]
    parts = taken.split([early, late])
    return [(*place, part) for place, part in zip(places, parts, strict=True)]


def _check(x: Tensor, dim: int, count: int, chunks: Chunks, rank: int) -> None:
    if not -x.ndim <= dim < x.ndim or x.shape[dim] != count:
        raise ValueError(
            f"cp::halo_exchange: got a tensor {tuple(x.shape)} and dim {dim}, of a "
            f"sequence of {chunks.length} on rank {rank} of {chunks.ranks}; needed "
            f"{count} tokens on that dim. Pass the chunk that torch.chunk deals out"
        )


def _with_more(x: Tensor, dim: int, tokens: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] += tokens
    return x.new_empty(shape)


halo_exchange.register_fake(
    lambda x, dim, length, before, after, group: _with_more(x, dim, before + after)
)
halo_exchange_backward.register_fake(
    lambda x, dim, length, before, after, group: _with_more(x, dim, -before - after)
)
goes_back_by(halo_exchange, lambda grad, _, *rest: halo_exchange_backward(grad, *rest))
