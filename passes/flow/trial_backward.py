"""Run the backward of a call on fake tensors, with every gradient that may arrive."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cpcompile.geometry.lengths import is_divided, is_symbol
from cpcompile.refusals import check_refusal
from cpcompile.torch_patches.tracing import plain_means_replicated
from cpcompile.torch_private import pytree


class OnlyWholeGradients(str):
    """The backward fails if the gradient is a sum over the ranks that waits."""


class OnlyUnsplitGradients(OnlyWholeGradients):
    """The backward fails if the gradient of a replicated result is split."""


def backward_problem(leaves: list[Any], result: Any) -> str | None:
    """Return why the backward cannot run; None if it can.

    Raises: what DTensor raises for usual gradients.
    """
    inputs = [x for x in leaves if isinstance(x, DTensor) and x.requires_grad]
    outputs = [
        x for x in pytree.tree_leaves(result) if isinstance(x, DTensor) and x.grad_fn
    ]
    if not inputs or not outputs:
        return None
    # Gradients arrive in the layout of the value, or contiguous: views differ on them.
    as_they_are = [_tangent(x) for x in outputs]

    def backward(tangents: Sequence[Tensor]) -> None:
        with plain_means_replicated():
            torch.autograd.grad(
                outputs, inputs, tangents, allow_unused=True, retain_graph=True
            )

    backward(as_they_are)
    if not all(x.is_contiguous() for x in as_they_are):
        backward([x.contiguous() for x in as_they_are])
    if any(p.is_replicate() for x in as_they_are for p in x.placements):
        try:
            backward([_as_sum(x) for x in as_they_are])
        except Exception as error:  # DTensor raises whatever its rules raise
            check_refusal(error, "the trial of a backward")
            return OnlyWholeGradients(first_line(error))
    for split in _splits(as_they_are):
        try:
            backward(split)
        except Exception as error:  # the same
            check_refusal(error, "the trial of a backward")
            return OnlyUnsplitGradients(first_line(error))
    return None


def _splits(tangents: list[DTensor]) -> Iterator[list[DTensor]]:
    """Yield gradients of replicated results that users of these may split.

    Attention does so.
    """
    mesh = tangents[0].device_mesh
    dims = range(max(x.ndim for x in tangents))
    for axis, dim in itertools.product(range(mesh.ndim), dims):
        if any(x.placements[axis].is_replicate() for x in tangents):
            yield [_split(x, axis, dim) for x in tangents]


def _split(x: DTensor, axis: int, dim: int) -> DTensor:
    """Split `x` along `dim` on a mesh axis, if it can be."""
    placements = list(x.placements)
    if not placements[axis].is_replicate() or dim >= x.ndim:
        return x
    if is_symbol(x.shape[dim]) and not is_divided(
        x.shape[dim], x.device_mesh.size(axis)
    ):
        return x  # shards of symbolic sizes have to be equal
    placements[axis] = Shard(dim)
    return x.redistribute(placements=placements)


def _tangent(x: Tensor) -> DTensor:
    detached = x.detach()
    assert isinstance(detached, DTensor)
    whole = [Replicate() if p.is_partial() else p for p in detached.placements]
    return detached.redistribute(placements=whole)


def _as_sum(x: DTensor) -> DTensor:
    """Make a gradient a sum with a summand on every rank, where it is not split."""
    summands = [Partial() if p.is_replicate() else p for p in x.placements]
    local = x.to_local()
    return DTensor.from_local(
        local,
        x.device_mesh,
        summands,
        run_check=False,
        shape=x.shape,
        stride=x.stride(),
    )


def first_line(error: Exception) -> str:
    """Return the first line of an error, in short."""
    return (str(error).strip().splitlines() or ["no message"])[0][:160]
