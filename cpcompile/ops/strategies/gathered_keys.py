"""Gather keys and values of the whole sequence, and scatter their gradients.

Note [Gathered keys in their own order]
Gathered keys are put in the order of the sequence, so that a run of consecutive queries
sees a rectangle and a triangle of them. In the zigzag layout the local queries are two
such runs, and there is one step for each.

Where every rank has all keys already, there is nothing to gather, and the gradients of
a rank are its summands; see passes/model/latents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cpcompile.cost.plans import Strategy
from cpcompile.geometry.layout import Chunks, TokenLayout
from cpcompile.ops.attention_spec import AttentionSpec
from cpcompile.ops.comm.communication import (
    Packing,
    all_gather_chunks,
    group_by_name,
    reduce_scatter_chunks,
)
from cpcompile.ops.strategies.contract import check_operands, dealt_tokens

Run = tuple[int, int]  # a position in the sequence, and the number of tokens from there


@dataclass(frozen=True)
class Gathered:
    """The data of one rank for a gathering; Note [Gathered keys in their own order]."""

    name: str
    queries: Chunks
    keys: Chunks
    is_causal: bool
    group: str
    rank: int
    tokens: TokenLayout | None  # None: as queries and keys say
    whole_keys: bool  # whether every rank has all keys already

    @classmethod
    def of(
        cls,
        name: str,
        operands: tuple[Tensor, Tensor, Tensor],
        spec: AttentionSpec,
        lengths: Sequence[int],
        group: str,
    ) -> Gathered:
        """Make it for this rank; raise ValueError if operands are not its tokens."""
        pg = group_by_name(group)
        queries, keys = (Chunks(length, pg.size()) for length in lengths)
        dealt = (spec.layout, queries, keys, spec.is_causal)
        tokens = dealt_tokens(Strategy.ALL_GATHER, *dealt)
        rank, whole_keys = pg.rank(), spec.whole_keys
        check_operands(name, *operands, queries, keys, rank, whole_keys=whole_keys)
        return cls(name, queries, keys, spec.is_causal, group, rank, tokens, whole_keys)

    @property
    def place(self) -> str:
        """Name of the operator and the rank, for messages."""
        ranks = self.keys.ranks
        return f"{self.name} on rank {self.rank} of {ranks} in group {self.group!r}"

    def runs(self, chunks: Chunks, rank: int) -> tuple[Run, ...]:
        """Return the runs of consecutive tokens of a rank."""
        if self.tokens is None:
            return ((chunks.start(rank), chunks.count(rank)),)
        head, count = self.tokens.head(rank), self.tokens.count(rank)
        return (self.tokens.first(rank), head), (self.tokens.tail(rank), count - head)

    def order(self) -> list[tuple[int, int, int, int]]:
        """Return every run of keys in the order of the sequence.

        A run is given by where it starts, its rank, where it starts there, and how many
        tokens it has.
        """
        runs = []
        for rank in range(self.keys.ranks):
            place = 0
            for start, count in self.runs(self.keys, rank):
                runs.append((start, rank, place, count))
                place += count
        return sorted(runs)


def gather_keys(k: Tensor, v: Tensor, own: Gathered) -> tuple[Tensor, Tensor]:
    """Gather keys and values of the whole sequence, [B, G, kv_len, dim]."""
    if own.keys.ranks == 1 or own.whole_keys:
        return k, v
    packing = Packing.of(k, v, own.keys.size)
    pg = group_by_name(own.group)
    gathered = all_gather_chunks(packing.pack(k, v), pg, own.place)
    views = zip(*map(packing.views, gathered.unbind(0)), strict=True)
    order = own.order()
    k_full, v_full = (
        torch.cat([x[rank].narrow(2, at, n) for _, rank, at, n in order], 2)
        for x in views
    )
    return k_full, v_full


def scatter_gradients(
    totals: Sequence[Tensor], k: Tensor, v: Tensor, own: Gathered
) -> tuple[Tensor, Tensor]:
    """Sum `totals` over ranks; return this rank's part in the dtypes of k and v.

    Of whole keys it is this rank's summand.
    """
    if own.whole_keys:
        dk, dv = (
            total.to(x.dtype, copy=True).contiguous()
            for total, x in zip(totals, (k, v), strict=True)
        )
        return dk, dv
    packing, pg = Packing.of(k, v, own.keys.size), group_by_name(own.group)
    shape = (own.keys.ranks, packing.numel)
    is_full = own.keys.length == own.keys.size * own.keys.ranks
    buffers = totals[0].new_empty(shape) if is_full else totals[0].new_zeros(shape)
    views = zip(*map(packing.views, buffers.unbind(0)), strict=True)
    for total, chunks in zip(totals, views, strict=True):
        for start, rank, place, count in own.order():
            chunks[rank].narrow(2, place, count).copy_(total.narrow(2, start, count))
    alone = own.keys.ranks == 1
    mine = buffers[0] if alone else reduce_scatter_chunks(buffers, pg, own.place)
    dk, dv = (
        total.narrow(2, 0, x.shape[2]).to(x.dtype, copy=True).contiguous()
        for total, x in zip(packing.views(mine), (k, v), strict=True)
    )
    return dk, dv
