"""Which argument of a call its result has its tokens from, as DTensor propagates them.

    linear(x, weight): dimension 1 of the result is dimension 1 of x

On a mesh with one rank per token an argument is split on one dimension, and the others
are replicated. If the result comes out split on the tokens in question, and nothing was
gathered on the way, that dimension has them. So sizes prove nothing; they only leave
out what cannot be.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from cpcompile.refusals import check_refusal

from ..graph.sequence_tokens import (
    SequenceDim,
    TokenDim,
    candidate_dims,
    token_dim,
)
from .permutation_proof import nothing_moves, token_mesh
from .shaped_calls import (
    ShapedCall,
    TensorShape,
    shaped_call,
)

log = logging.getLogger(__name__)


class TokenSources:
    """Asks DTensor, and remembers what it said."""

    def __init__(self, fake_mode: FakeTensorMode, device_type: str) -> None:
        self.fake_mode, self.device_type = fake_mode, device_type
        self._meshes: dict[int, DeviceMesh] = {}
        self._memory: dict[Any, list[tuple[int, TokenDim]]] = {}

    def of(
        self, node: fx.Node, sequence: SequenceDim, index: int | None = None
    ) -> list[tuple[fx.Node, TokenDim]]:
        """The arguments that `sequence` in the result of a call comes from.

        index: of several results, which one.
        """
        if sequence.tokens < 2:
            return []
        call, leaves = shaped_call(node, index)
        key = call.key
        found = None if key is None else self._memory.get((key, sequence))
        if found is None:
            found = list(self._trials(call, leaves, sequence))
            if key is not None:
                self._memory[key, sequence] = found
        return [(leaves[number], dim) for number, dim in found]

    def _trials(
        self, call: ShapedCall, leaves: list[Any], sequence: SequenceDim
    ) -> Iterator[tuple[int, TokenDim]]:
        """The arguments by number, each once, and their dimensions."""
        tried: set[fx.Node] = set()
        for number, (leaf, value) in enumerate(zip(leaves, call.values, strict=True)):
            if not isinstance(value, TensorShape) or leaf in tried:
                continue
            tried.add(leaf)
            for dim in candidate_dims(value.shape, sequence.tokens):
                split = [dim if other is leaf else None for other in leaves]
                if self._splits(call, split, sequence):
                    yield number, dim
                    break

    def _splits(
        self, call: ShapedCall, split: list[TokenDim | None], sequence: SequenceDim
    ) -> bool:
        """Whether arguments that are split so give a result that is split so."""
        mesh = self._meshes.get(sequence.tokens)
        if mesh is None:
            mesh = token_mesh(self.device_type, sequence.tokens)
            self._meshes[sequence.tokens] = mesh
        try:
            with nothing_moves(cut=True), self.fake_mode, torch.no_grad():
                result = call.on(mesh, split)
        except Exception as error:  # whatever DTensor's rules or views raise
            check_refusal(error, f"the search for the tokens of {call.target}")
            log.debug("%s split %s: %s", call.target, split, type(error).__name__)
            return False
        return token_dim(result, 0, sequence.tokens) == sequence.dim
