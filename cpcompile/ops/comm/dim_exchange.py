"""cp::dim_exchange: from a part of one dimension to a part of another.

    rank r has   [.., its tokens, .., all heads, ..]
              -> [.., all tokens, .., its heads, ..]

One all-to-all of uneven parts. The gradient is the way back. It is what
cp::ulysses_scatter does for attention, for any two dimensions: a call that mixes tokens
and treats every head by itself is computed in parts so.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from cpcompile.geometry.layout import Chunks
from cpcompile.ops.comm.communicating import goes_back_by
from cpcompile.ops.comm.communication import as_bytes, call_site, group_by_name


@torch.library.custom_op("cp::dim_exchange", mutates_args=())
def dim_exchange(
    x: Tensor, source: int, source_size: int, target: int, target_size: int, group: str
) -> Tensor:
    """Return all of dimension `source`, and this rank's chunk of dimension `target`.

    Args:
        x: [.., local entries, .., target_size, ..], the rank's chunk of `source` as
            torch.chunk deals it out, and all of `target`.
        source, target: two dimensions of x.
        source_size, target_size: their whole sizes, equal on every rank.
        group: name of the process group.

    Returns: [.., source_size, .., local entries, ..], contiguous.

    Raises: ValueError for another number of entries, or dimensions that are not two;
    torch's error with a note if the exchange fails.
    """
    pg = group_by_name(group)
    ranks, rank = pg.size(), pg.rank()
    rows, columns = Chunks(source_size, ranks), Chunks(target_size, ranks)
    _check(x, source, target, rows.count(rank), target_size, rank)
    result = _empty_result(x, source, source_size, target, target_size, group)
    if ranks == 1:
        return result.copy_(x)
    everyone = range(ranks)
    leaving = [
        x.narrow(target, columns.start(other), columns.count(other)).reshape(-1)
        for other in everyone
    ]
    arriving = [
        result.narrow(source, rows.start(other), rows.count(other))
        for other in everyone
    ]
    sent = torch.cat(leaving)
    received = sent.new_empty(result.numel())
    where = f"cp::dim_exchange on rank {rank} of {ranks} in group {group!r}"
    with call_site(where):
        dist.all_to_all_single(
            as_bytes(received.unsqueeze(1)),
            as_bytes(sent.unsqueeze(1)),
            [part.numel() for part in arriving],
            [part.numel() for part in leaving],
            group=pg,
        )
    counts = [part.numel() for part in arriving]
    for part, came in zip(arriving, received.split(counts), strict=True):
        part.copy_(came.view(part.shape))
    return result


def _empty_result(
    x: Tensor, source: int, source_size: int, target: int, target_size: int, group: str
) -> Tensor:
    pg = group_by_name(group)
    shape = list(x.shape)
    shape[source] = source_size
    shape[target] = Chunks(target_size, pg.size()).count(pg.rank())
    return x.new_empty(shape)


dim_exchange.register_fake(_empty_result)
goes_back_by(
    dim_exchange,
    lambda grad, _, source, source_size, target, target_size, group: dim_exchange(
        grad, target, target_size, source, source_size, group
    ),
)


def _check(
    x: Tensor, source: int, target: int, count: int, width: int, rank: int
) -> None:
    dims = range(x.ndim)
    if source not in dims or target not in dims or source == target:
        raise ValueError(
            f"cp::dim_exchange: got dimensions {source} and {target} of a tensor "
            f"{tuple(x.shape)}; needed two of its {x.ndim}, counted from 0"
        )
    if x.shape[source] != count or x.shape[target] != width:
        raise ValueError(
            f"cp::dim_exchange: got a tensor {tuple(x.shape)} on rank {rank}; needed "
            f"{count} entries on dim {source} and {width} on dim {target}. Pass the "
            "chunk that torch.chunk deals out"
        )
