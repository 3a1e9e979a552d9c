"""Collective exchange of packed key/value chunks, and process groups by name.

A chunk of keys and values is gathered as one flat buffer: all keys, then all values,
each [B, G, chunk size, dim] and contiguous, so that one collective carries both. Chunks
are padded to the largest chunk; who reads a chunk knows how many of its tokens are
real.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, ProcessGroup

from cpcompile.torch_private.distributed import (
    RecordFunctionFast,
    resolve_process_group,
)

SPAN = "cp: "  # how the names of spans begin

# torch 2.13 renames these two and warns at each call of the old name.
if hasattr(dist, "all_gather_single"):
    _ALL_GATHER, _REDUCE_SCATTER = dist.all_gather_single, dist.reduce_scatter_single
else:
    _ALL_GATHER, _REDUCE_SCATTER = (
        dist.all_gather_into_tensor,
        dist.reduce_scatter_tensor,
    )


def group_by_name(name: str) -> ProcessGroup:
    """Return the process group called `name`; raise torch's error if there is none."""
    return resolve_process_group(GroupName(name))


@dataclass(frozen=True)
class Packing:
    """The packing of a chunk of two tensors [B, G, size, D] and [B, G, size, E]."""

    batch: int
    heads: int
    size: int
    first_dim: int
    second_dim: int

    @classmethod
    def of(cls, k_BGKD: Tensor, v_BGKE: Tensor, size: int) -> Packing:
        B, G, _, D = k_BGKD.shape
        return cls(B, G, size, D, v_BGKE.shape[-1])

    @property
    def numel(self) -> int:
        """Number of elements of a packed chunk."""
        tokens = self.batch * self.heads * self.size
        return tokens * (self.first_dim + self.second_dim)

    def views(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two tensors inside of a packed chunk; writing to them fills it."""
        B, G, S = self.batch, self.heads, self.size
        first, second = buffer.split(
            (B * G * S * self.first_dim, B * G * S * self.second_dim)
        )
        return (
            first.view(B, G, S, self.first_dim),
            second.view(B, G, S, self.second_dim),
        )

    def pack(self, k_BGKD: Tensor, v_BGKE: Tensor) -> Tensor:
        """Make a new packed chunk; tokens past those of k and v are zero."""
        count = k_BGKD.shape[2]
        make = k_BGKD.new_empty if count == self.size else k_BGKD.new_zeros
        buffer = make(self.numel)
        for view, part in zip(self.views(buffer), (k_BGKD, v_BGKE), strict=True):
            view.narrow(2, 0, count).copy_(part)
        return buffer


def as_bytes(tokens: Tensor) -> Tensor:
    """View tokens as [tokens, bytes]: backends exchange other dtypes than torch has."""
    numel = tokens.shape[1:].numel()
    return tokens.view(len(tokens), numel).view(torch.uint8)


def span(name: str) -> AbstractContextManager[Any]:
    """Name a part of an operator, for torch.profiler to show.

    It is like torch.profiler.record_function, but no operator itself: where a graph is
    traced through it, it leaves nothing in the graph.
    """
    return RecordFunctionFast(f"{SPAN}{name}")


@contextmanager
def call_site(where: str) -> Iterator[None]:
    """Name an exchange, in profiles, and in an error of torch.distributed."""
    try:
        with span(where):
            yield
    except RuntimeError as error:
        error.add_note(f"cpcompile: this exchange belongs to {where}")
        raise


def all_gather_chunks(buffer: Tensor, group: ProcessGroup, where: str) -> Tensor:
    """Gather the packed chunks of all ranks, [ranks, numel]."""
    gathered = buffer.new_empty(group.size() * buffer.numel())
    with call_site(where):
        _ALL_GATHER(gathered, buffer, group=group)
    return gathered.view(group.size(), -1)


def reduce_scatter_chunks(buffers: Tensor, group: ProcessGroup, where: str) -> Tensor:
    """Sum over ranks this rank's row of `buffers`, which is [ranks, numel]."""
    reduced = buffers.new_empty(buffers.shape[1])
    with call_site(where):
        _REDUCE_SCATTER(reduced, buffers.view(-1), group=group)
    return reduced
