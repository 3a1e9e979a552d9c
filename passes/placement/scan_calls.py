"""Scans, torch's higher-order operators, on DTensors.

    carry, ys = scan(step, [carry], [x])          x: [S, B, C], steps along S
      on a rank, if x is split along C
    carry, ys = scan(step, [its carry], [its x])

Note [Steps that keep entries apart]
A rank may scan the entries that it has if each step keeps entries apart. That is asked
of DTensor as `flow` asks: one step runs on tensors without data, and nothing may move.
Carries and what all steps read may be whole, as zeros are; they are cut where a step
would cut them. A sequence that is split along its steps cannot be scanned by parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from cpcompile.geometry.lengths import expected, is_symbol
from cpcompile.ops.dtensor.local_part import dtensor_of
from cpcompile.torch_private import pytree
from cpcompile.torch_private.fake_tensors import FakeTensorMode, disable_current_modes
from cpcompile.torch_private.operators import generic_associative_scan

from ..flow.flow import EntriesMeet, nothing_moves
from ..flow.trial import RandomNumbers
from ..graph.constant_arguments import GraphArgument

SCAN, ASSOCIATIVE_SCAN = "scan", "associative_scan"
_Placements = tuple[Placement, ...]
_APART = "a step needs more than the entries of a rank"


def cp_scan(
    step: GraphArgument, kind: str, carried: int, scanned: int, *operands: Any
) -> list[Tensor]:
    """Scan along dimension 0; of DTensors a rank scans the entries that it has.

    Args:
        step: of SCAN (*carries, *slices, *others) -> [*carries, *slices], of
            ASSOCIATIVE_SCAN (*slices, *slices, *others) -> [*slices].
        kind: one of both.
        carried, scanned: how many operands are carried, and how many are scanned; the
            others, which every step reads, come last.

    Raises: EntriesMeet where a step would need more than a rank's entries.
    """
    scan = Scan(step, kind, carried, scanned)
    if not any(isinstance(x, DTensor) for x in operands):
        return scan.run(operands)
    if any(isinstance(x, Tensor) and not isinstance(x, DTensor) for x in operands):
        raise EntriesMeet("an operand is no DTensor")
    mesh = next(x.device_mesh for x in operands if isinstance(x, DTensor))
    ends = carried + scanned
    for i, x in enumerate(operands):
        if isinstance(x, Tensor) and any(
            map(is_symbol, x.shape[carried <= i < ends :])
        ):
            raise EntriesMeet("a size of a step is a symbol")
    placements, results = scan.placed(operands, mesh)
    own = [
        x if p is None else x.redistribute(placements=p)._local_tensor
        for x, p in zip(operands, placements, strict=True)
    ]
    for i in range(carried):
        own[i] = _compact(own[i])
    steps = operands[carried].shape[0]
    wrapped: list[Tensor] = []
    for i, (x, like) in enumerate(zip(scan.run(own), results, strict=True)):
        if i < carried:
            wrapped.append(dtensor_of(x, mesh, like.placements, like.shape))
        else:
            placed, shape = _moved(like.placements, 1), (steps, *like.shape)
            wrapped.append(dtensor_of(x.contiguous(), mesh, placed, shape))
    return wrapped


def scanned_in_parts(
    step: GraphArgument, kind: str, carried: int, scanned: int, *operands: Any
) -> list[Tensor]:
    """Do what `cp_scan` does; mark in a graph that ranks scan the steps they have."""
    return cp_scan(step, kind, carried, scanned, *operands)


def joined_operands(node: fx.Node) -> Sequence[fx.Node]:
    """Return what an associative scan scans; nothing of any other call.

    Or if its steps read more than that, which torch 2.13 does not trace.
    """
    if node.target not in (cp_scan, scanned_in_parts):
        return ()
    _, kind, carried, scanned, *operands = node.args
    if kind != ASSOCIATIVE_SCAN or scanned != len(operands):
        return ()
    assert carried == 0
    return operands  # type: ignore[return-value]


def _compact(x: Tensor) -> Tensor:
    """Copy x; torch compares strides of what enters a step and leaves it, even of 1."""
    return x.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Scan:
    """The scan without its operands; see `cp_scan`."""

    step: GraphArgument
    kind: str
    carried: int
    scanned: int

    def run(self, operands: Sequence[Any]) -> list[Tensor]:
        """Call torch's operator; where gradients are needed, the steps that it makes.

        torch's gradient of an associative scan (seen in 2.13) takes each result to
        depend on its own operand alone, as [a a', a' b + b'] does not, and its memory
        is quadratic in the steps.
        """
        ends = self.carried + self.scanned
        carries, others = list(operands[: self.carried]), tuple(operands[ends:])
        slices = list(operands[self.carried : ends])
        if self.kind == ASSOCIATIVE_SCAN:
            records = torch.is_grad_enabled() and any(
                isinstance(x, Tensor) and x.requires_grad for x in operands
            )
            if records:
                return [*generic_associative_scan(self.step.graph, slices, 0, others)]
            scan = torch.ops.higher_order.associative_scan
            return list(scan(self.step.graph, slices, others))
        scan = torch.ops.higher_order.scan
        return list(scan(self.step.graph, carries, slices, others))

    def placed(
        self, operands: Sequence[Any], mesh: DeviceMesh
    ) -> tuple[list[_Placements | None], list[DTensor]]:
        """Return placements with which nothing moves, and what one step returns."""
        placements = [
            tuple(x.placements) if isinstance(x, DTensor) else None for x in operands
        ]
        for _ in range(len(operands) + 1):  # one more of them is cut each time
            cut, cuts_inside, results = self._one_step(operands, placements, mesh)
            if not cut:
                break
            for i, dim in cut.items():
                placements[i] = tuple(
                    Shard(dim) if p.is_replicate() else p for p in placements[i] or ()
                )
        kept = placements[: self.carried]
        if self.kind == ASSOCIATIVE_SCAN:  # what it scans is what it returns
            kept = [_moved(p or (), -1) for p in placements[: self.scanned]]
        if cut or cuts_inside or kept != [x.placements for x in results[: len(kept)]]:
            raise EntriesMeet(_APART)
        self._one_step(operands, placements, mesh, is_final=True)
        return placements, results

    def _one_step(
        self,
        operands: Sequence[Any],
        placements: Sequence[_Placements | None],
        mesh: DeviceMesh,
        is_final: bool = False,
    ) -> tuple[dict[int, int], bool, list[DTensor]]:
        """Run a step without data; return the operands to cut, each with a dimension.

        And whether a value inside would be cut, and the results. is_final: nothing is
        cut any more, and every call has to do with local parts what DTensor does.
        """
        ends = self.carried + self.scanned
        random = RandomNumbers()  # type: ignore[no-untyped-call]
        with disable_current_modes(), FakeTensorMode(), torch.no_grad(), random:
            given = [
                x
                if p is None
                else _without_data(x, p, mesh, of_step=self.carried <= i < ends)
                for i, (x, p) in enumerate(zip(operands, placements, strict=True))
            ]
            twice = given[: self.scanned] if self.kind == ASSOCIATIVE_SCAN else []
            with nothing_moves() as moves:
                runner = _OnParts if is_final else fx.Interpreter
                results = runner(self.step.graph).run(*twice, *given)
        if moves.ends_sums or random.drawn:
            raise EntriesMeet(_APART)
        numbers = {
            id(x._local_tensor): i
            for i, x in enumerate(given)
            if isinstance(x, DTensor)
        }
        if not all(isinstance(x, DTensor) for x in results):
            raise EntriesMeet("a step returns something that is no tensor")
        cut, cuts_inside = {}, False
        for local, at in moves.cut:
            number = numbers.get(id(local))
            if number is None or at.outer > 1:
                cuts_inside = True
            else:
                cut[number] = at.dim + (self.carried <= number < ends)
        for i, result in enumerate(results[: self.carried]):
            before, (after, *_) = placements[i], result.placements
            if before != result.placements and before == (Replicate(),):
                if not isinstance(after, Shard):
                    raise EntriesMeet(_APART)
                cut[i] = after.dim
        return cut, cuts_inside, list(results)


class _OnParts(fx.Interpreter):
    """Runs a step on DTensors, and each call on their local parts beside it.

    A rank runs the same graph as one process: `x.view(4, -1)` makes four heads of the
    two that a rank has, where DTensor makes two.
    """

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if node.op in ("call_function", "call_method"):
            args, kwargs = pytree.tree_map(
                _local, self.fetch_args_kwargs_from_env(node)
            )
            local = getattr(self, node.op)(node.target, args, kwargs)
            if _shapes(local) != _shapes(pytree.tree_map(_local, result)):
                raise EntriesMeet(f"{node.name} depends on the size that is split")
        return result


def _local(x: Any) -> Any:
    return x._local_tensor if isinstance(x, DTensor) else x


def _shapes(x: Any) -> list[Any]:
    return [
        tuple(y.shape) if isinstance(y, Tensor) else y for y in pytree.tree_leaves(x)
    ]


def _without_data(
    x: DTensor, placements: _Placements, mesh: DeviceMesh, of_step: bool
) -> DTensor:
    """Return an operand of one step, on fake tensors."""
    shape = [expected(n) for n in x.shape]
    placements = _moved(placements, -1 if of_step else 0)
    shape = shape[1:] if of_step else shape
    local = list(shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local[placement.dim] = -(-local[placement.dim] // mesh.size(axis))
    return dtensor_of(
        torch.empty(local, dtype=x.dtype, device=x.device), mesh, placements, shape
    )


def _moved(placements: _Placements, by: int) -> _Placements:
    """Return placements of values with a dimension more or less in front."""
    moved: list[Placement] = []
    for placement in placements:
        if isinstance(placement, Replicate):
            moved.append(placement)
        elif type(placement) is Shard and placement.dim + by >= 0:
            moved.append(Shard(placement.dim + by))
        else:
            raise EntriesMeet(f"{placement} is along the steps, or no plain part")
    return tuple(moved)
