"""Proves that a call does the same with every token, whatever the others are.

DTensor's own sharding propagation is the proof. On a mesh with one rank per token, a
call whose sharded inputs keep their placements and whose result is sharded likewise
computes every token on a rank of its own: so it commutes with every permutation of the
tokens. The same holds for what is summed over the tokens, a Partial result. Where
DTensor would have to bring an input to another placement, the tokens meet, and nothing
is proved.

A replicated input that such a call would cut, position embeddings, say, has tokens as
well: it is tried as a sharded one, and to be permuted where the others are.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

# Where DTensor moves local tensors, by itself or asked to; seen in torch 2.11 to 2.13.
from torch.distributed.tensor import (
    DTensor,
    Placement,
    _dispatch,
    _redistribute,
)
from torch.utils import _pytree as pytree

from cpcompile.geometry.lengths import expected
from cpcompile.refusals import check_refusal

from ..graph.nodes import expected_shape
from ..graph.sequence_tokens import TokenDim, candidate_dims, token_dim
from .trial import call_key

log = logging.getLogger(__name__)

# Constants that are tried as sharded inputs, at most: a call has one or two.
_MOST_CHOICES = 32

Constants = dict[int, TokenDim]


class TokensMeet(Exception):
    """DTensor would have to bring an input to another placement."""


class TokenWise:
    """Proofs for one sequence of `tokens` tokens, sharded on a mesh axis.

    symbolic: whether their number is a symbol, which has this value in this call. The
    proof is for the value: a call whose other sizes depend on it has them as symbols.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        axis: int,
        tokens: int,
        fake_mode: FakeTensorMode,
        symbolic: bool = False,
    ) -> None:
        self.symbolic = symbolic
        self.axis, self.tokens, self.fake_mode = axis, tokens, fake_mode
        self.of_sequence = mesh
        self.mesh = token_mesh(mesh.device_type, tokens)
        self._memory: dict[Any, Constants | None] = {}

    def dim_of(self, value: Any) -> TokenDim | None:
        """Where the tokens of a value are, if it has them."""
        where = self.axis, self.tokens, self.of_sequence, self.symbolic
        return token_dim(value, *where)

    def prove(
        self, call: Callable[..., Any], args: Any, kwargs: Any, result: Any
    ) -> Constants | None:
        """Which inputs have tokens besides those that are sharded, or None.

        Args:
            call, args, kwargs, result: a call on the real mesh, its values fake.

        Returns: for replicated tensors that are to be cut as the others are, their
        number among the leaves of (args, kwargs); None if the call is not token-wise.
        """
        key = call_key(call, args, kwargs)
        if key is None:
            return self._prove(call, args, kwargs, result)
        if key not in self._memory:
            self._memory[key] = self._prove(call, args, kwargs, result)
        return self._memory[key]

    def _prove(
        self, call: Callable[..., Any], args: Any, kwargs: Any, result: Any
    ) -> Constants | None:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for constants in self._choices(leaves):
            try:
                with nothing_moves(), self.fake_mode, torch.no_grad():
                    tried = [
                        self._leaf(x, constants.get(i)) for i, x in enumerate(leaves)
                    ]
                    fresh_args, fresh_kwargs = pytree.tree_unflatten(tried, spec)
                    with enable_python_dispatcher():
                        found = call(*fresh_args, **fresh_kwargs)
            except Exception as error:  # whatever DTensor's rules or views raise
                check_refusal(error, f"the proof that {call} is token-wise")
                log.debug("%s is not proved: %s %s", call, type(error).__name__, error)
                continue
            if self._agrees(result, found):
                return constants
        return None

    def _choices(self, leaves: list[Any]) -> Iterator[Constants]:
        """Without constants that have tokens, and then with one or several."""
        possible = [
            [None, *candidate_dims(x.shape, self.tokens, self.symbolic)]
            if isinstance(x, DTensor) and x.placements[self.axis].is_replicate()
            else [None]
            for x in leaves
        ]
        for dims in itertools.islice(itertools.product(*possible), _MOST_CHOICES):
            yield {i: dim for i, dim in enumerate(dims) if dim is not None}

    def _leaf(self, x: Any, constant: TokenDim | None) -> Any:
        """The argument on the mesh of tokens."""
        if isinstance(x, torch.SymInt):
            return expected(x)
        if not isinstance(x, DTensor):
            return x
        dim = constant or self.dim_of(x)
        placement: Placement = x.placements[self.axis] if dim is None else dim.placement
        if dim is None and not (placement.is_replicate() or placement.is_partial()):
            raise TokensMeet  # another sequence is sharded
        shape, strides = (tuple(map(expected, y)) for y in (x.shape, x.stride()))
        own = list(shape)
        if dim is not None:
            own[dim.dim] //= self.tokens
        order = sorted(range(x.ndim), key=lambda d: -strides[d])
        local = torch.empty_permuted(own, order, dtype=x.dtype, device=x.device)
        return DTensor.from_local(
            local,
            self.mesh,
            [placement],
            run_check=False,
            shape=torch.Size(shape),
            stride=strides,
        )

    def _agrees(self, real: Any, found: Any) -> bool:
        """Whether results are placed on tokens as they are on the real mesh."""
        reals, spec = pytree.tree_flatten(real)
        founds, other = pytree.tree_flatten(found)
        return spec == other and all(map(self._alike, reals, founds))

    def _alike(self, real: Any, found: Any) -> bool:
        if not isinstance(real, DTensor):
            return not isinstance(found, Tensor)  # nothing is known of plain ones
        if not isinstance(found, DTensor) or expected_shape(real) != found.shape:
            return False
        dim = self.dim_of(real)
        if dim is not None:
            return token_dim(found, 0, self.tokens) == dim
        (placement,), expected = found.placements, real.placements[self.axis]
        return placement == expected and getattr(expected, "dim", None) is None


def token_mesh(device_type: str, tokens: int) -> DeviceMesh:
    """A mesh with one rank per token, without a process group: it exchanges nothing."""
    return DeviceMesh(device_type, torch.arange(tokens), _init_backend=False, _rank=0)


@contextmanager
def nothing_moves(cut: bool = False, sums: bool = True) -> Iterator[None]:
    """Bringing a local tensor to another placement raises TokensMeet.

    cut: a replicated tensor may be cut, which needs nothing of other ranks.
    sums: a sum over the ranks is allowed, which is the same in whatever order.
    """

    def stay(local: Tensor, current: Any, target: Any, **_: Any) -> Tensor:
        if len(current.placements) > 1:  # of a mesh of the user's, with other axes
            raise TokensMeet
        (before,), (after,) = current.placements, target.placements
        if before == after:
            return local
        if sums and before.is_partial() and after.is_replicate():
            return local
        dim = getattr(after, "dim", None)
        if before.is_replicate() and dim is not None:
            # All of an expanded dimension are equal, so that none is a token's own.
            if not cut and local.stride(dim) != 0:
                raise TokensMeet
            return local.narrow(dim, 0, local.shape[dim] // current.mesh.size())
        raise TokensMeet

    with ExitStack() as stack:
        for module in (_dispatch, _redistribute):
            stack.enter_context(
                mock.patch.object(module, "redistribute_local_tensor", stay)
            )
        yield
