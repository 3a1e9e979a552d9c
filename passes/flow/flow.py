"""Say where the entries of one dimension go in a call; this is the one place to ask.

    mm(x, w), x cut along 0                      cut along 0
    mm(x.T, g), cut along 1 and 0                a sum over the entries
    add(x, table), x cut along 1                 cut along 1, and so is table, along 0
    softmax(x, 1), x cut along 1                 none: entries meet

Note [One rank per entry]
DTensor's own propagation is the answer. On a mesh with one rank per entry a call whose
operands keep their placements computes every entry on a rank of its own, or one summand
of a sum. So it commutes with every permutation of the entries, and a rank may run it on
the entries that it has. Where DTensor would have to bring an operand to another
placement, entries meet, and nothing is known. The dimension may be any: tokens, heads,
channels, rows of a batch.

An operand that is the same for all entries may be cut on the way, as the table above:
that needs no message, and it then has entries as well.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from cpcompile.refusals import check_refusal
from cpcompile.torch_private import pytree
from cpcompile.torch_private.distributed import dtensor_dispatch, dtensor_redistribute
from cpcompile.torch_private.fake_tensors import (
    FakeTensorMode,
    disable_current_modes,
    failing_quietly,
)

from ..graph.sequence_tokens import TokenDim, token_dim
from .shaped_calls import ShapedCall
from .trial import RandomNumbers

log = logging.getLogger(__name__)


class EntriesMeet(Exception):
    """Raised where DTensor would have to bring an operand to another placement."""


class Unknown(Enum):
    """The role of a result that is no DTensor, or whose placement says nothing."""

    UNKNOWN = "unknown"


UNKNOWN = Unknown.UNKNOWN

Role = TokenDim | Placement | None
"""Of an operand: the dimension that is cut, a Partial, or None: the same for all."""


@dataclass(frozen=True)
class Result:
    """A tensor among the results of a call."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    role: Role | Unknown

    @property
    def is_sum(self) -> bool:
        """Tell whether it is a sum over the entries, which may be added up in parts."""
        return bool(self.role == Partial()) and self.dtype != torch.bool


@dataclass(frozen=True)
class Flow:
    """The flow of a call: where the entries go.

    results: one for every leaf of the result; None for what is no tensor.
    spec: how the leaves are nested.
    cut: operands that were said to be the same for all entries, although each entry
        needs a part of its own; by their number among the leaves of the arguments.
    cuts_inside: whether a value inside of the call is cut so, as positions are.
    ends_sums: whether a sum over the entries is added up inside, by a message.
    draws: whether random numbers are drawn.
    """

    results: tuple[Result | None, ...]
    spec: pytree.TreeSpec
    cut: dict[int, TokenDim]
    cuts_inside: bool
    ends_sums: bool
    draws: bool

    @property
    def is_local(self) -> bool:
        """Tell whether operands as they were given are enough for every entry."""
        return not (self.cut or self.cuts_inside or self.ends_sums or self.draws)

    @property
    def tensors(self) -> list[Result]:
        """Results that are tensors."""
        return [x for x in self.results if x is not None]


class Flows:
    """Flows of calls, asked of DTensor and remembered: layers repeat."""

    def __init__(self, fake_mode: FakeTensorMode, device_type: str) -> None:
        self.fake_mode, self.device_type = fake_mode, device_type
        self._meshes: dict[int, DeviceMesh] = {}
        self._answers: dict[Any, Flow | None] = {}

    def of(
        self,
        call: ShapedCall,
        roles: Sequence[Role],
        entries: int,
        ranks: int | None = None,
    ) -> Flow | None:
        """Return the flow of a call, or None where entries meet or nothing is known.

        Args:
            roles: one per leaf of the arguments.
            entries: their number. What holds for one entry need not hold for more.
            ranks: ask for the first of so many ranks, which share the entries as
                torch.chunk deals them out, in place of one rank per entry.
        """
        key = None
        if call.key is not None:
            autocast = [torch.is_autocast_enabled(x) for x in ("cpu", "cuda")]
            key = (call.key, tuple(roles), entries, ranks, *autocast)
        if key is None or key not in self._answers:
            answer = self._ask(call, roles, entries, ranks or entries)
            if key is None:
                return answer
            self._answers[key] = answer
        return self._answers[key]

    def _ask(
        self, call: ShapedCall, roles: Sequence[Role], entries: int, ranks: int
    ) -> Flow | None:
        mesh = self._meshes.get(ranks)
        if mesh is None:
            mesh = self._meshes[ranks] = entry_mesh(self.device_type, ranks)
        random = RandomNumbers()  # type: ignore[no-untyped-call]
        try:
            with ExitStack() as stack:
                moves = stack.enter_context(nothing_moves())
                stack.enter_context(failing_quietly())
                for mode in (self.fake_mode, torch.no_grad(), random):
                    stack.enter_context(mode)
                if self.fake_mode.shape_env is not None:
                    # Sizes that only data tells are symbols of this question alone.
                    symbols = self.fake_mode.shape_env.ignore_fresh_unbacked_symbols()
                    stack.enter_context(symbols)
                operands = call.operands(mesh, roles)
                result = call.run(operands)
        except Exception as error:  # whatever DTensor's rules or views raise
            check_refusal(error, f"the flow of {call.target}")
            log.debug("%s of %s: %s", call.target, roles, type(error).__name__)
            return None
        numbers = {id(_local(x)): i for i, x in reversed([*enumerate(operands)])}
        leaves, spec = pytree.tree_flatten(result)
        cut: dict[int, TokenDim] = {}
        for local, dim in moves.cut:
            number = numbers.get(id(local)) if isinstance(local, Tensor) else None
            if number is not None and cut.setdefault(number, dim) != dim:
                return None
        return Flow(
            tuple(_result(x, entries) for x in leaves),
            spec,
            cut,
            any(id(local) not in numbers for local, _ in moves.cut),
            moves.ends_sums,
            random.drawn,
        )


_flows: WeakKeyDictionary[FakeTensorMode, Flows] = WeakKeyDictionary()


def flows_of(fake_mode: FakeTensorMode, device_type: str) -> Flows:
    """Return what all passes over the graph of a fake mode share; they ask alike."""
    flows = _flows.get(fake_mode)
    if flows is None or flows.device_type != device_type:
        flows = _flows[fake_mode] = Flows(fake_mode, device_type)
    return flows


def entry_mesh(device_type: str, entries: int) -> DeviceMesh:
    """Make a mesh with one rank per entry that has no process group.

    DTensor remembers what it answered for meshes that are equal; the name keeps this
    mesh apart from a user's with as many ranks.
    """
    with disable_current_modes():  # it reads the ranks, which are not to be fake
        return DeviceMesh(
            device_type,
            torch.arange(entries),
            mesh_dim_names=("cpcompile: one rank per entry",),
            _init_backend=False,
            _rank=0,
        )


def _local(x: Any) -> Any:
    return x._local_tensor if isinstance(x, DTensor) else x


def _result(x: Any, entries: int) -> Result | None:
    if not isinstance(x, Tensor):
        return None
    return Result(tuple(x.shape), x.dtype, _role(x, entries))


def _role(x: Tensor, entries: int) -> Role | Unknown:
    if not isinstance(x, DTensor):
        return UNKNOWN
    (placement,) = x.placements
    if placement.is_replicate():
        return None
    if placement.is_partial():
        return placement
    return token_dim(x, 0, entries) or UNKNOWN


@dataclass
class Moves:
    """Moves of local tensors that need nothing of other ranks, or sums only.

    cut: tensors that were the same on every rank, and where they were cut.
    """

    cut: list[tuple[Tensor, TokenDim]] = field(default_factory=list)
    ends_sums: bool = False


@contextmanager
def nothing_moves() -> Iterator[Moves]:
    """Raise EntriesMeet where a local tensor is brought to another placement.

    Two moves are noted instead: to cut a replicated one, and to add up a sum over all
    ranks.
    """
    moves = Moves()

    def stay(local: Tensor, current: Any, target: Any, **_: Any) -> Tensor:
        if len(current.placements) > 1:  # of a mesh of the user's, with other axes
            raise EntriesMeet
        (before,), (after,) = current.placements, target.placements
        if before == after:
            return local
        if before.is_partial() and after.is_replicate():
            moves.ends_sums = True
            return local
        dim = getattr(after, "dim", None)
        if before.is_replicate() and dim is not None:
            # All parts of an expanded dimension are equal: none is an entry's own.
            if local.stride(dim) != 0:
                outer = getattr(after, "split_factor", 1)
                moves.cut.append((local, TokenDim(dim, outer)))
            return local.narrow(dim, 0, -(-local.shape[dim] // current.mesh.size()))
        raise EntriesMeet

    with ExitStack() as stack:
        for module in (dtensor_dispatch, dtensor_redistribute):
            stack.enter_context(
                mock.patch.object(module, "redistribute_local_tensor", stay)
            )
        yield moves
