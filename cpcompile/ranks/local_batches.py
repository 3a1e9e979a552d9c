"""`cp.shard_batch`: this rank's tokens of a batch, and the sequence they belong to.

Note [Which sequence local tokens are of]
A rank that holds 6 tokens cannot tell whether the sequence has 11 or 12. So the length
and the layout of each batch that is cut are remembered for its process group. Code that
is handed local tokens looks them up: in the forward, the last batch counts. A backward
that recomputes a checkpointed forward may come when the next batch is cut already.
There the tokens are found by their memory: they lie where they lay in the forward, and
nothing else can have taken that memory while they are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.tensor import DTensor

from cpcompile.errors import InputError
from cpcompile.geometry.layout import Layout, TokenLayout
from cpcompile.ranks.shardings import check_dim, flat_axis
from cpcompile.torch_private import pytree

IGNORED_LABEL = -100  # as in torch.nn.functional.cross_entropy
_MOST_REMEMBERED = 65_536


def shard_batch(
    batch: Any,
    mesh: DeviceMesh,
    *,
    dim: int = 1,
    axis: str | tuple[str, str] = "cp",
    layout: str = "contiguous",
    shift_labels: bool = False,
) -> Any:
    """Return this rank's tokens of a batch that every rank of the axis holds in full.

    There is no communication. For models whose modules take and return local tokens,
    see `ContextParallel`.

    Args:
        batch: a tensor, or a nest of dicts, lists and tuples of tensors; each has the
            tokens of one sequence in dimension `dim`. Other values stay as they are.
        mesh: the device mesh. axis: name of its axis that shards the sequence, or names
            of two axes, the left one outside.
        layout: which tokens each rank gets: "contiguous", "zigzag", "striped" or
            "fold", see docs/layouts.md. Zigzag gives all ranks equal work in causal
            attention.
        shift_labels: replace "labels" of a dict by "shift_labels", which has at each
            position the label of the next one, as transformers' causal language models
            take it: they cannot look beyond the last token of a rank.

    Returns: the same nest with local tensors; the last ranks have shorter ones where
    the ranks do not divide the length. A dict that has no "position_ids" gets them, [1,
    local tokens], int64: the positions in the whole sequence.

    Raises: InputError if there is no tensor or no such dimension, if lengths differ,
    or for DTensors and unknown names.
    """
    if layout not in [choice.value for choice in Layout]:
        names = ", ".join(repr(choice.value) for choice in Layout)
        raise InputError(
            f"cp.shard_batch: got layout {layout!r}; needed one of {names}"
        )
    flat = flat_axis(mesh, axis)
    if isinstance(batch, Mapping) and shift_labels:
        batch = _with_shifted_labels(batch, dim)
    elif shift_labels:
        raise InputError(
            f"cp.shard_batch: got shift_labels=True and a {type(batch).__name__}; "
            "needed a dict with 'labels'"
        )
    tensors = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]
    length = _common_length(tensors, dim)
    sequence = SequenceLayout(length, Layout(layout))
    rank = flat.get_local_rank()
    tokens = TokenLayout.of(Layout(layout), length, flat.size())
    positions = tokens.positions(rank, tensors[0].device)
    remember(flat.get_group(), sequence)
    local = pytree.tree_map_only(
        Tensor, lambda x: x.index_select(dim, positions.to(x.device)), batch
    )
    if isinstance(local, dict):
        local.setdefault("position_ids", positions[None])
    return local


@dataclass(frozen=True)
class SequenceLayout:
    """The whole sequence that local tokens belong to."""

    length: int
    layout: Layout


class _Remembered:
    """The last sequence of a process group, and those of tensors in memory."""

    def __init__(self) -> None:
        self.last: SequenceLayout | None = None
        self.by_memory: OrderedDict[int, SequenceLayout] = OrderedDict()


_remembered: WeakKeyDictionary[ProcessGroup, _Remembered] = WeakKeyDictionary()


def remember(group: ProcessGroup, sequence: SequenceLayout) -> None:
    """Note the sequence that the ranks of `group` work on from now on."""
    _remembered.setdefault(group, _Remembered()).last = sequence


def sequence_of(x: Tensor, group: ProcessGroup) -> SequenceLayout | None:
    """Return the sequence whose local tokens `x` has; None if no batch was cut.

    See Note [Which sequence local tokens are of].
    """
    remembered = _remembered.get(group)
    if remembered is None or remembered.last is None:
        return None
    address = x.data_ptr()
    if torch._C._current_graph_task_id() != -1:  # a backward runs
        return remembered.by_memory.get(address, remembered.last)
    remembered.by_memory[address] = remembered.last
    remembered.by_memory.move_to_end(address)
    if len(remembered.by_memory) > _MOST_REMEMBERED:
        remembered.by_memory.popitem(last=False)
    return remembered.last


def _common_length(tensors: list[Tensor], dim: int) -> int:
    if not tensors:
        raise InputError("cp.shard_batch: got no tensor; needed at least one")
    lengths = set()
    for x in tensors:
        if isinstance(x, DTensor):
            raise InputError(
                f"cp.shard_batch: got a DTensor {tuple(x.shape)}; needed plain tensors "
                "that every rank holds in full"
            )
        lengths.add(x.shape[check_dim("cp.shard_batch", x, dim)])
    if len(lengths) > 1:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise InputError(
            f"cp.shard_batch: got tensors of {sorted(lengths)} tokens in dimension "
            f"{dim}: {shapes}; needed one length: cut others by hand, or leave them out"
        )
    return lengths.pop()


def _with_shifted_labels(batch: Mapping[str, Any], dim: int) -> dict[str, Any]:
    if not isinstance(batch.get("labels"), Tensor):
        raise InputError(
            f"cp.shard_batch: got shift_labels=True and a batch of {sorted(batch)}; "
            "needed a tensor 'labels' in it"
        )
    labels = batch["labels"]
    dim = check_dim("cp.shard_batch", labels, dim)
    end = torch.full_like(
        labels.narrow(dim, 0, min(1, labels.shape[dim])), IGNORED_LABEL
    )
    rest = labels.narrow(dim, 1, max(0, labels.shape[dim] - 1))
    unshifted = {name: x for name, x in batch.items() if name != "labels"}
    return unshifted | {"shift_labels": torch.cat([rest, end], dim)}
