"""Run calls that do the same with every token as one call on the tokens of a rank.

DTensor has no part in what happens between sorting tokens by their expert and bringing
them back: a rank sorts its own tokens, and the others do not matter. On plain tensors
the call does what the calls did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from cpcompile.ops.dtensor.local_part import dtensor_of, local_part
from cpcompile.ops.dtensor.shares import sharing_rows
from cpcompile.torch_private import pytree

from ...graph.constant_arguments import GraphArgument


@dataclass(frozen=True, repr=False, eq=False)
class RowProgram(GraphArgument):
    """A program that does the same with every row of some arguments.

    graph: graph(rows, *args) gives one tensor or several, for any number of rows.
    name: of what it does.
    arguments: which arguments have a row per token, along dimension 0; the others are
        the same for all tokens.
    results: which results have a row per token, in the order of their leaves; the
        others are sums over the tokens.
    not_counted: where all results are sums, for each argument a number that adds
        nothing to them, or None if its rows may have any number. None if it is not
        known.
    """

    name: str
    arguments: tuple[bool, ...]
    results: tuple[bool, ...]
    not_counted: tuple[int | None, ...] | None = None

    @property
    def label(self) -> str:  # type: ignore[override]
        return self.name

    def text(self) -> str:
        return f"{self.arguments} {self.results} {super().text()}"


def row_program_of(node: fx.Node) -> RowProgram | None:
    """Return the program of rows that a node runs; None if it runs none."""
    program = node.args[0] if node.target is cp_row_parallel else None
    return program if isinstance(program, RowProgram) else None


def cp_row_parallel(program: RowProgram, *args: Tensor) -> Any:
    """Run a program on the rows of this rank, or on all rows of plain tensors."""
    of_rows = [x for x, has in zip(args, program.arguments, strict=True) if has]
    dtensors = [x for x in of_rows if isinstance(x, DTensor)]
    if not dtensors:
        return program.run(of_rows[0].shape[0], *args)
    mesh, placements = dtensors[0].device_mesh, _row_placements(dtensors)
    local = [
        _local(x, mesh, placements, has)
        for x, has in zip(args, program.arguments, strict=True)
    ]
    first = next(x for x, has in zip(local, program.arguments, strict=True) if has)
    tokens = of_rows[0].shape[0]
    with sharing_rows(mesh, placements, tokens, first.shape[0]):
        results, spec = pytree.tree_flatten(program.run(first.shape[0], *local))
    placed = [
        _distributed(x, mesh, placements, tokens if has else None)
        for x, has in zip(results, program.results, strict=True)
    ]
    return pytree.tree_unflatten(placed, spec)


def _row_placements(dtensors: list[DTensor]) -> tuple[Placement, ...]:
    """Return how rows are split in the argument that most mesh axes split."""

    def rows(x: DTensor) -> tuple[Placement, ...]:
        split = (getattr(p, "dim", None) == 0 for p in x.placements)
        return tuple(
            p if is_split else Replicate()
            for p, is_split in zip(x.placements, split, strict=True)
        )

    return max(
        map(rows, dtensors),
        key=lambda placements: sum(not p.is_replicate() for p in placements),
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
    return dtensor_of(x.contiguous(), mesh, placements, shape)
