"""Find the attention patterns that are over a sequence: its tokens come from an input.

    tokens -> embedding -> linear -> q          attention over dimension 1 of an input
    x -> linear -> view [B, S, heads, D]        heads come from the weight: it stays
    x -> view, permute -> windows of 7 x 7      windows: other parts of the same
                                                dimensions are batch; they stay

The tokens of queries and of keys are followed backwards (tokens/sequence_dims).
Queries may be none: a class token, a mean of tokens, learned latents. Attention over
another dimension of an input that is sharded has each rank's own entries, and nothing
to exchange.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch.fx as fx
from torch.distributed.device_mesh import DeviceMesh

from cpcompile.torch_private.fake_tensors import FakeTensorMode

from ...flow.view_chain import follow
from ...graph.calls import canonical_call
from ...graph.nodes import fake_value, reached
from ..tokens.dim_flows import rows_before
from ..tokens.sequence_dims import Origins, SequenceDims
from .matched import AttentionPattern


class InputDim(NamedTuple):
    """A dimension of an input."""

    node: fx.Node
    dim: int


class _Attention(Protocol):
    @property
    def tokens(self) -> tuple[tuple[fx.Node, int], ...]:
        """Queries, keys and values, each with its dimension of tokens."""


_Found = TypeVar("_Found", bound=_Attention)


def over_sequences(
    graph: fx.Graph,
    attentions: Iterable[_Found],
    fake_mode: FakeTensorMode,
    mesh: DeviceMesh,
    axis: int,
    inputs: set[fx.Node],
    sharded: set[InputDim],
) -> list[_Found]:
    """Keep the attention whose tokens are those of a sequence, in order.

    inputs: inputs of the graph that are no parameters. sharded: dimensions that are
    known to be sharded; empty if none is.
    """
    dims = SequenceDims(graph, [], fake_mode, mesh, axis)
    settled: set[Any] = set()
    accepted = []
    for call in attentions:
        queries, keys = (dims.origins(*x, settled) for x in call.tokens[:2])
        if not _are_data(keys, inputs):
            continue
        if not (_are_data(queries, inputs) or _may_ask(call, queries)):
            continue
        both = (queries, keys)
        if sharded and not any(x.is_known for x in both):
            begun = {InputDim(*x) for origins in both for x in origins.nodes}
            if not _may_be_shared(_made_of(dims, begun), sharded):
                continue
        accepted.append(call)
        settled.update(*(x.steps for x in both))
    return accepted


def _may_ask(call: _Attention, queries: Origins) -> bool:
    """Tell whether queries may be no tokens: a class token, a mean, learned latents.

    Where weights are read too, ranks share the queries, and have to have some.
    """
    in_windows = queries.parts or any(_is_window(*x) for x in _begun(queries))
    return isinstance(call, AttentionPattern) and not in_windows


def _may_be_shared(tokens: set[InputDim], sharded: set[InputDim]) -> bool:
    """Tell whether tokens are those that are sharded, or of no input that is.

    Of another dimension of such an input each rank has its own entries.
    """
    of_sharded = {x.node for x in sharded} & {x.node for x in tokens}
    return bool(tokens & sharded) or not of_sharded


def _made_of(dims: SequenceDims, tokens: set[InputDim]) -> set[InputDim]:
    """Return these tokens and what they are made of, as of the rows of an image."""

    def made_of(x: InputDim) -> list[InputDim]:
        before = rows_before(*x)
        origins = () if before is None else dims.origins(*before, set()).nodes
        return [InputDim(*y) for y in origins]

    return set(reached(tokens, made_of))


def is_over_sequence(
    softmax: fx.Node, dims: SequenceDims, inputs: set[fx.Node]
) -> bool:
    """Tell whether the entries that a softmax sums up are tokens of a sequence."""
    arguments = canonical_call(softmax).arguments
    source, dim = arguments.get("input"), arguments.get("dim")
    if not isinstance(source, fx.Node) or not isinstance(dim, int):
        return False
    tokens = dims.origins(source, dim % fake_value(source).ndim, set())
    return _are_data(tokens, inputs)


def _are_data(tokens: Origins, inputs: set[fx.Node]) -> bool:
    """Tell whether tokens come from an input, or begin on the way, but not in windows.

    One way to an input is proof, whatever is added on others, as routed experts are.
    """
    if tokens.is_known or any(node in inputs for node, _ in tokens.nodes):
        return True
    begun = _begun(tokens)
    return bool(begun) and not (tokens.parts or any(_is_window(*x) for x in begun))


def _begun(tokens: Origins) -> list[tuple[fx.Node, int]]:
    """Return the values of calls in which tokens begin, with their dimension."""
    return [(node, dim) for node, dim in tokens.nodes if node.op.startswith("call")]


def _is_window(node: fx.Node, dim: int) -> bool:
    """Tell whether a view deals one dimension out to both the tokens and the batch."""
    dims = follow(node)[-1].dims
    parts = [{factor.dim for factor in x if factor.dim is not None} for x in dims]
    return any(parts[dim] & x for at, x in enumerate(parts) if at != dim)
