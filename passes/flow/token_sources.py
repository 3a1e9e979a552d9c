"""Find out from which operand of a call its result has its tokens.

    linear(x, weight): dimension 1 of the result is dimension 1 of x

The table of common calls is asked first. For other calls an operand is cut along one
dimension, by DTensor's proof. If the result is then cut along the dimension of
its tokens, and nothing was gathered on the way, the operand's dimension has the tokens.
So sizes prove nothing; they only leave out what cannot be. Of a view they leave one
dimension.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.fx as fx

from ..graph.nodes import expected_shape, value_of
from ..graph.sequence_tokens import SequenceDim, TokenAxis, TokenDim, candidate_dims
from .dim_rules import dim_map
from .flow import Flows
from .shaped_calls import TensorShape, shaped_call

_MANY = 2  # one token meets no other


def token_sources(
    flows: Flows, node: fx.Node, sequence: SequenceDim, index: int | None = None
) -> Iterator[tuple[fx.Node, TokenDim]]:
    """Yield the operands that `sequence` in the result of a call comes from, each once.

    index: which one of several results counts.
    """
    if sequence.tokens < _MANY:
        return
    table, possible = dim_map(node), None
    if table is not None:
        value = value_of(node) if index is None else value_of(node)[index]
        dim = sequence.dim
        inner = expected_shape(value)[dim.dim] // dim.outer // sequence.tokens
        axis = TokenAxis(dim.dim, dim.outer, inner)
        axes = None if table.draws else table.before(node, axis, sequence.tokens)
        possible = [(x, TokenDim(at.dim, at.outer)) for x, at in (axes or {}).items()]
        if not table.is_view:  # DTensor follows fewer views
            yield from possible
            return
    call, leaves = shaped_call(node, index)
    tried: set[fx.Node] = set()
    for leaf, value in zip(leaves, call.values, strict=True):
        if not isinstance(value, TensorShape) or leaf in tried:
            continue
        tried.add(leaf)
        for dim in candidate_dims(value.shape, sequence.tokens):
            if possible is not None and (leaf, dim) not in possible:
                continue
            roles = [dim if other is leaf else None for other in leaves]
            flow = flows.of(call, roles, sequence.tokens)
            if flow is not None and [x.role for x in flow.tensors] == [sequence.dim]:
                yield leaf, dim
                break
