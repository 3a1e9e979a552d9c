"""Find the attention patterns that are over a sequence: its tokens come from an input.

    tokens -> embedding -> linear -> q          attention over dimension 1 of an input
    x -> linear -> view [B, S, heads, D]        heads come from the weight: it stays
    x -> view, permute -> windows of 7 x 7      windows: other parts of the same
                                                dimensions are batch; they stay

The tokens of queries and of keys are followed backwards (sharding/sequence_dims). Where
inputs are sharded, the tokens have to be theirs: attention over another dimension of
them has each rank's own entries, and nothing to exchange.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch.fx as fx
from torch.distributed.device_mesh import DeviceMesh

from cpcompile.torch_private.fake_tensors import FakeTensorMode

from ...flow.view_chain import follow
from ...graph.calls import canonical_call
from ...graph.nodes import fake_value
from ..sharding.rows_before import rows_before
from ..sharding.sequence_dims import Origins, SequenceDims


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
        both = [dims.origins(*x, settled) for x in call.tokens[:2]]
        if not all(_are_data(x, inputs) for x in both):
            continue
        reached = {InputDim(*x) for origins in both for x in origins.nodes}
        is_known = any(x.is_known for x in both)
        if sharded and not (is_known or _reach(dims, reached, sharded)):
            continue
        accepted.append(call)
        settled.update(*(x.steps for x in both))
    return accepted


def _reach(dims: SequenceDims, tokens: set[InputDim], sharded: set[InputDim]) -> bool:
    """Tell whether a sharded dimension has the tokens, or is one that makes them.

    The rows of an image do, which are flattened with its columns.
    """
    open_dims, asked = [*tokens], set[InputDim]()
    while open_dims:
        found = open_dims.pop()
        if found in sharded:
            return True
        before = None if found in asked else rows_before(*found)
        asked.add(found)
        if before is not None:
            origins = dims.origins(*before, set())
            open_dims += [InputDim(*x) for x in origins.nodes]
    return False


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
    begins = [node for node, _ in tokens.nodes if node.op.startswith("call")]
    return bool(begins) and not (tokens.parts or any(map(_is_window, begins)))


def _is_window(node: fx.Node) -> bool:
    """Tell whether a view deals one dimension out to both the tokens and the batch."""
    dims = follow(node)[-1].dims
    parts = [{factor.dim for factor in dim if factor.dim is not None} for dim in dims]
    return any(a & b for i, a in enumerate(parts) for b in parts[i + 1 :])
