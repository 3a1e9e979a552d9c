"""Tokens exchanged for heads a few heads at a time, while others are attended to.

    start 0 | start 1 | finish 0, attend 0, start back 0 | start 2 | finish 1, ...

An exchange is two operators, `start`, which packs and sends, and `finish`, which waits
and unpacks. What is on its way may not be read in between. The gradient of a finish is
a start of the way back, and that of a start its finish, so that the backward overlaps
as the forward does. In a compiled graph Inductor keeps operators that communicate in
this order, see collective_order.py.

Only the messages of two groups exist at a time, where one exchange of all heads needs
three times what it sends. Method: heads in chunks (arXiv 2602.21196).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import CustomOpDef

from cpcompile.geometry.head_split import HeadSplit, group_counts
from cpcompile.ops.comm.communicating import goes_back_by
from cpcompile.ops.comm.communication import call_site, group_by_name
from cpcompile.ops.comm.head_exchange import (
    HeadBlock,
    Results,
    empty_heads,
    empty_tokens,
    pack_heads,
    pack_tokens,
    place,
    unpack_heads,
    unpack_tokens,
    with_exchanged_heads,
)
from cpcompile.ops.traced_nodes import sharing
from cpcompile.torch_private.distributed import register_work


@torch.library.custom_op("cp::ulysses_scatter_start", mutates_args=())
def scatter_start(
    tensors: Sequence[Tensor], blocks: Sequence[int], group: str
) -> Tensor:
    """Begin cp::ulysses_scatter.

    Args:
        tensors: [B, heads, local tokens, dim] each, of one dtype.
        blocks: the fields of a HeadBlock for each of them.
        group: name of the process group.

    Returns: what arrives, [ranks, elements], to be read by cp::ulysses_scatter_finish.

    Raises: ValueError for tensors that are no such chunks; torch's error with a note if
    the exchange cannot be started.
    """
    return _start(pack_tokens, "cp::ulysses_scatter_start", tensors, blocks, group)


@torch.library.custom_op("cp::ulysses_scatter_finish", mutates_args=())
def scatter_finish(
    arriving: Tensor, batch: int, blocks: Sequence[int], group: str
) -> list[Tensor]:
    """Finish cp::ulysses_scatter; return its results.

    Raises: torch's error with a note if the exchange fails.
    """
    _wait(arriving, "cp::ulysses_scatter_finish", group)
    return unpack_heads(arriving, batch, HeadBlock.read(blocks), group)


@torch.library.custom_op("cp::ulysses_gather_start", mutates_args=())
def gather_start(
    tensors: Sequence[Tensor], blocks: Sequence[int], group: str
) -> Tensor:
    """Begin cp::ulysses_gather, as cp::ulysses_scatter_start does the scatter.

    tensors: [B, heads per rank, length, dim] each.
    """
    return _start(pack_heads, "cp::ulysses_gather_start", tensors, blocks, group)


@torch.library.custom_op("cp::ulysses_gather_finish", mutates_args=())
def gather_finish(
    arriving: Tensor, batch: int, blocks: Sequence[int], group: str
) -> list[Tensor]:
    """Finish cp::ulysses_gather, as cp::ulysses_scatter_finish does the scatter."""
    _wait(arriving, "cp::ulysses_gather_finish", group)
    return unpack_tokens(arriving, batch, HeadBlock.read(blocks), group)


def _register(
    start: CustomOpDef,
    finish: CustomOpDef,
    empty_results: Callable[..., list[Tensor]],
    start_back: CustomOpDef,
    finish_back: CustomOpDef,
) -> None:
    """Give a way its fake results; the gradient of its start finishes the way back."""
    start.register_fake(_arriving)
    finish.register_fake(
        lambda arriving, batch, blocks, group: empty_results(
            arriving, batch, HeadBlock.read(blocks), group
        )
    )
    goes_back_by(
        start, lambda grad, shapes, *rest: finish_back(grad, shapes[0][0], *rest)
    )
    goes_back_by(finish, lambda grads, _, batch, *rest: start_back(grads, *rest))


@dataclass(frozen=True)
class _Exchange:
    """Tensors that travel together: what arrives of them."""

    arriving: Tensor
    batch: int
    blocks: list[int]
    group: str

    @classmethod
    def of(
        cls,
        start: Callable[..., Tensor],
        tensors: Sequence[Tensor],
        blocks: Sequence[HeadBlock],
        group: str,
    ) -> _Exchange:
        """Start an exchange."""
        numbers = [number for block in blocks for number in astuple(block)]
        arriving = start(tensors, numbers, group)
        return cls(arriving, tensors[0].shape[0], numbers, group)

    def finish(self, finish: Callable[..., list[Tensor]]) -> list[Tensor]:
        """Return what has arrived."""
        return finish(self.arriving, self.batch, self.blocks, self.group)


def with_heads_in_groups(
    attend: Callable[..., Results],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, int],
    sizes: tuple[int, int],
    group: str,
    groups: int,
) -> Results:
    """Run `attend` on all tokens of this rank's heads; return its own tokens.

    The same as `with_exchanged_heads`, in parts: `attend(q, k, v, first)` computes some
    of the rank's heads, from the `first` one on. Keys that several parts read travel
    once, with the first of them.

    groups: how many parts at most; of fewer heads than were planned for, as where they
    are split over another axis too, there may be fewer.
    """
    ranks, heads, kv_heads = group_by_name(group).size(), q.shape[1], k.shape[1]
    counts = group_counts(heads, kv_heads, ranks)
    groups = max((count for count in counts if count <= groups), default=1)
    if groups == 1:
        attend_all = functools.partial(attend, first=0)
        return with_exchanged_heads(attend_all, q, k, v, lengths, sizes, group)
    split = HeadSplit(heads, kv_heads, ranks)
    own, run = split.per_rank // groups, split.per_rank // split.kv_per_rank
    keys_apart = split.key_groups(groups) > 1
    (q_len, kv_len), (q_size, kv_size) = lengths, sizes
    queries = _groups_of(q, ranks, own)
    keys = [_groups_of(x, ranks, own // run) for x in (k, v)] if keys_apart else []
    whole_keys: list[tuple[Tensor, ...]] = []

    def start(number: int) -> _Exchange:
        tensors = [queries[number].flatten(1, 2)]
        blocks = [HeadBlock(ranks * own, ranks * own, q_len, q_size, q.shape[3])]
        if keys_apart or number == 0:
            pair = [x[number].flatten(1, 2) for x in keys] if keys_apart else [k, v]
            readers = ranks * own if keys_apart else heads
            tensors += pair
            blocks += [
                HeadBlock(readers, x.shape[1], kv_len, kv_size, x.shape[3])
                for x in pair
            ]
        return _Exchange.of(scatter_start, tensors, blocks, group)

    def keys_of(number: int, arrived: list[Tensor]) -> Sequence[Tensor]:
        if keys_apart:
            return arrived
        if number == 0:  # a head of keys each, or more where a group reads more
            count = max(own // run, 1)
            whole_keys.extend(zip(*(x.split(count, 1) for x in arrived), strict=True))
        return whole_keys[number * own // max(run, own)]

    def start_back(results: list[Tensor]) -> _Exchange:
        blocks = [
            HeadBlock(ranks * own, ranks * own, q_len, q_size, x.shape[3])
            for x in results
        ]
        return _Exchange.of(gather_start, results, blocks, group)

    coming, leaving = deque([start(0)]), deque[list[_Exchange]]()
    arrived: list[list[Tensor]] = []

    def run_group(number: int) -> None:  # in eager, its tensors are freed on return
        if number + 1 < groups:
            coming.append(start(number + 1))
        q_part, *rest = coming.popleft().finish(scatter_finish)
        k_part, v_part = keys_of(number, rest)
        with sharing(ranks):
            out, lse = attend(q_part, k_part, v_part, number * own)
        if leaving:
            arrived.append(_finished(leaving.popleft()))
        if lse is None:
            leaving.append([start_back([out])])
        elif lse.dtype == out.dtype:
            leaving.append([start_back([out, lse.unsqueeze(-1)])])
        else:
            leaving.append([start_back([x]) for x in (out, lse.unsqueeze(-1))])

    for number in range(groups):
        run_group(number)
    arrived.append(_finished(leaving.popleft()))
    out, *lses = (_joined(parts, ranks) for parts in zip(*arrived, strict=True))
    return out, lses[0].squeeze(-1) if lses else None


def _finished(exchanges: list[_Exchange]) -> list[Tensor]:
    return [x for exchange in exchanges for x in exchange.finish(gather_finish)]


def _groups_of(x: Tensor, ranks: int, own: int) -> tuple[Tensor, ...]:
    """Cut [B, heads, ..] into views with `own` heads of those of every rank each.

    Returns: [B, ranks, own, ..] of every part. To flatten one is to copy it.
    """
    return tuple(x.unflatten(1, (ranks, -1)).split(own, 2))


def _joined(parts: Sequence[Tensor], ranks: int) -> Tensor:
    """Undo `_groups_of`, of parts that are flattened."""
    return torch.cat([x.unflatten(1, (ranks, -1)) for x in parts], 2).flatten(1, 2)


def _arriving(tensors: Sequence[Tensor], numbers: Sequence[int], group: str) -> Tensor:
    """Return a buffer of the size of all blocks."""
    ranks, batch = group_by_name(group).size(), tensors[0].shape[0]
    count = 0
    for block in HeadBlock.read(numbers):
        per_rank = block.split(ranks).kv_per_rank
        count += batch * per_rank * block.size * block.dim
    return tensors[0].new_empty((ranks, count))


def _start(
    pack: Callable[..., Tensor],
    name: str,
    tensors: Sequence[Tensor],
    blocks: Sequence[int],
    group: str,
) -> Tensor:
    """Send row r of what is packed to rank r; return what arrives, on its way."""
    buffer = pack(name, tensors, HeadBlock.read(blocks), group)
    pg = group_by_name(group)
    if pg.size() == 1:
        return buffer
    received = torch.empty_like(buffer)
    with call_site(place(name, group)):
        work = dist.all_to_all_single(received, buffer, group=pg, async_op=True)
    register_work(received, work)
    return received


def _wait(arriving: Tensor, name: str, group: str) -> None:
    with call_site(place(name, group)):
        torch.ops._c10d_functional.wait_tensor(arriving)


_scatter, _gather = (scatter_start, scatter_finish), (gather_start, gather_finish)
_register(*_scatter, empty_heads, *_gather)
_register(*_gather, empty_tokens, *_scatter)
