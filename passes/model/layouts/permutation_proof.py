"""Prove that a call commutes with every permutation of the tokens.

A flow with one rank per token says just this: no token meets another. A sum over the
tokens may be added up in any order. A replicated operand that such a call would cut,
such as position embeddings, has tokens as well. It is tried as a sharded operand, and
has to be permuted where the others are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cpcompile.geometry.lengths import expected
from cpcompile.torch_private import pytree
from cpcompile.torch_private.fake_tensors import FakeTensorMode

from ...flow.flow import EntriesMeet, Flow, Result, Role, flows_of
from ...flow.shaped_calls import ShapedCall, TensorShape
from ...graph.nodes import expected_shape
from ...graph.sequence_tokens import TokenDim, candidate_dims, token_dim

# Choices of constants as sharded inputs that are tried, at most; a call has one or two
# such constants.
_MOST_CHOICES = 32


class PermutationProofs:
    """Proofs for one sequence of `tokens` tokens, sharded on a mesh axis.

    symbolic: whether the number of tokens is a symbol, which has this value in this
        call. The proof is for the value: a call whose other sizes depend on it has them
        as symbols.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        axis: int,
        tokens: int,
        fake_mode: FakeTensorMode,
        symbolic: bool = False,
    ) -> None:
        self.axis, self.tokens, self.symbolic = axis, tokens, symbolic
        self.mesh = mesh
        self.flows = flows_of(fake_mode, mesh.device_type)

    def dim_of(self, value: Any) -> TokenDim | None:
        """Return the dimension of a value's tokens; None if it has none."""
        return token_dim(value, self.axis, self.tokens, self.mesh, self.symbolic)

    def prove(
        self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any
    ) -> dict[int, TokenDim] | None:
        """Return which operands have tokens in addition to the sharded ones, or None.

        Args:
            function, args, kwargs, result: a call on the real mesh, its values fake.

        Returns: the token dimension of each replicated tensor that is to be cut as the
            others are, by its number among the leaves of (args, kwargs); None if the
            call is not token-wise.
        """
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        try:
            roles = [self._role(x) for x in leaves]
        except EntriesMeet:
            return None
        call = ShapedCall(function, [_without_data(x) for x in leaves], spec)
        for constants in self._choices(leaves):
            tried = [constants.get(i, role) for i, role in enumerate(roles)]
            flow = self.flows.of(call, tried, self.tokens)
            if flow is None or flow.cut or flow.cuts_inside:
                continue
            if self._agrees(result, flow):
                return constants
        return None

    def _choices(self, leaves: list[Any]) -> Iterator[dict[int, TokenDim]]:
        """Yield choices of constants with tokens: none first, then one or several."""
        possible = [
            [None, *candidate_dims(x.shape, self.tokens, self.symbolic)]
            if isinstance(x, DTensor) and x.placements[self.axis].is_replicate()
            else [None]
            for x in leaves
        ]
        for dims in itertools.islice(itertools.product(*possible), _MOST_CHOICES):
            yield {i: dim for i, dim in enumerate(dims) if dim is not None}

    def _role(self, x: Any) -> Role:
        if not isinstance(x, DTensor):
            return None
        dim, placement = self.dim_of(x), x.placements[self.axis]
        if dim is not None or placement.is_replicate():
            return dim
        if placement.is_partial():
            return placement
        raise EntriesMeet  # another sequence is sharded

    def _agrees(self, real: Any, flow: Flow) -> bool:
        """Tell whether results are placed on tokens as they are on the real mesh."""
        reals, spec = pytree.tree_flatten(real)
        return spec == flow.spec and all(map(self._alike, reals, flow.results))

    def _alike(self, real: Any, result: Result | None) -> bool:
        if not isinstance(real, DTensor):
            return result is None  # nothing is known of plain tensors
        if result is None or tuple(expected_shape(real)) != result.shape:
            return False
        dim = self.dim_of(real)
        if dim is not None:
            return result.role == dim
        placement = real.placements[self.axis]
        if placement.is_replicate():
            return result.role is None
        return placement.is_partial() and result.role == placement


def _without_data(x: Any) -> Any:
    if isinstance(x, torch.SymInt):
        return expected(x)
    return TensorShape.of(x) if isinstance(x, DTensor) else x
