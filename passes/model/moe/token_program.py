"""Run calls that do the same with every token as one call on the tokens of a rank.

DTensor has no part in what happens between sorting tokens by their expert and bringing
them back: a rank sorts its own tokens, and the others do not matter. On plain tensors
the call does what the calls did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.utils import _pytree as pytree

from cpcompile.ops.dtensor.local_part import contiguous_strides, local_part
from cpcompile.ops.dtensor.shares import sharing_rows


@dataclass(frozen=True)
class RowArguments:
    """The arguments and results of a call that have a row per token; see row_program.

    not_counted: where all results are sums, for each argument a number that adds
        nothing to them, or None if its rows may have any number. None if it is not
        known.
    """

    arguments: tuple[bool, ...]
    results: tuple[bool, ...]
    not_counted: tuple[int | None, ...] | None = None


def rows_of(call: Any) -> RowArguments | None:
    """Return the Rows of a function that `row_program` made; None for any other."""
    found: RowArguments | None = getattr(call, "rows", None)
    return found if isinstance(found, RowArguments) else None


def row_program(
    module: fx.GraphModule,
    row_arguments: tuple[bool, ...],
    row_results: tuple[bool, ...],
    name: str,
) -> Callable[..., Any]:
    """Make a function of the arguments of `module` after its first one.

    Args:
        module: module(rows, *args) gives one tensor or several, for any number of rows.
        row_arguments: which arguments have a row per token, along dimension 0; the
            others are the same for all tokens.
        row_results: which results have a row per token, in the order of their
            leaves; the others are sums over the tokens.
    """

    def call(*args: Tensor) -> Any:
        of_rows = [x for x, has in zip(args, row_arguments, strict=True) if has]
        given = [x for x in of_rows if isinstance(x, DTensor)]
        if not given:
            return module(of_rows[0].shape[0], *args)
        mesh, placements = given[0].device_mesh, _row_placements(given)
        local = [
            _local(x, mesh, placements, has)
            for x, has in zip(args, row_arguments, strict=True)
        ]
        first = next(x for x, has in zip(local, row_arguments, strict=True) if has)
        tokens = of_rows[0].shape[0]
        with sharing_rows(mesh, placements, tokens, first.shape[0]):
            results, spec = pytree.tree_flatten(module(first.shape[0], *local))
        placed = [
            _distributed(x, mesh, placements, tokens if has else None)
            for x, has in zip(results, row_results, strict=True)
        ]
        return pytree.tree_unflatten(placed, spec)

    call.__name__ = name
    call.rows = RowArguments(row_arguments, row_results)  # type: ignore[attr-defined]
    return call


def _row_placements(given: list[DTensor]) -> tuple[Placement, ...]:
    """Return how rows are split in the argument that most mesh axes split."""

    def rows(x: DTensor) -> tuple[Placement, ...]:
        split = (getattr(p, "dim", None) == 0 for p in x.placements)
        return tuple(
            p if is_split else Replicate()
            for p, is_split in zip(x.placements, split, strict=True)
        )

    return max(
        map(rows, given), key=lambda found: sum(not p.is_replicate() for p in found)
    )


def _local(
    x: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], has_rows: bool
) -> Tensor:
    """Return the rows of this rank, or all of x.

    The gradient of the latter is a sum over the ranks.
    """
    whole = (Replicate(),) * mesh.ndim
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, whole, run_check=False)
    if has_rows:
        return local_part(x.redistribute(placements=placements))
    return local_part(x.redistribute(placements=whole), _sums(placements))


def _sums(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    return tuple(Replicate() if p.is_replicate() else Partial() for p in placements)


def _distributed(
    x: Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    tokens: int | None,
) -> DTensor:
    """Make a DTensor of a result: `tokens` rows in all, or a sum if that is None."""
    if tokens is None:
        return DTensor.from_local(x, mesh, _sums(placements), run_check=False)
    shape = torch.Size((tokens, *x.shape[1:]))
    return DTensor.from_local(
        x.contiguous(),
        mesh,
        placements,
        run_check=False,
        shape=shape,
        stride=contiguous_strides(shape),
    )
