"""Find the inputs that carry the sequence where `options["shard"]` does not say it.

An input carries it if tokens of q, k or v of an attention call, or of a mixer, come
from one of its dimensions (passes/sequence_dims), or are made of its rows by several
products (image_rows). This is read from the graph; sizes play no part. Where
a whole model has none of these calls, the last dimension of the indices of an embedding
is the sequence, or the rows are those that convolutions read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch.fx as fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cpcompile.errors import InputError
from cpcompile.frontend.arguments import Frame, argument_path
from cpcompile.frontend.image_rows import ImageRows
from cpcompile.passes.graph.calls import canonical_call, spelled
from cpcompile.passes.graph.effects import kept_inputs
from cpcompile.passes.graph.nodes import all_nodes, fake_mode_of, fake_value
from cpcompile.passes.model.patterns.attention_weights import (
    AttentionWithWeights,
    attention_with_weights,
)
from cpcompile.passes.model.patterns.match_attention import attention_patterns
from cpcompile.passes.model.patterns.matched import AttentionPattern
from cpcompile.passes.model.patterns.pattern_sequences import over_sequences
from cpcompile.passes.model.patterns.unmatched import is_product
from cpcompile.passes.model.tokens.dim_flows import token_operands
from cpcompile.passes.model.tokens.sequence_dims import SequenceDims


def infer_inputs(
    graph: fx.Graph, frame: Frame, mesh: DeviceMesh, axis: int
) -> dict[fx.Node, tuple[str, int]]:
    """Return the placeholders that carry a sequence, with name and dimension.

    The result is empty where inputs are DTensors on `mesh`, which say it themselves.
    Caches that the program writes to are left out.

    Raises: InputError if attention calls or mixers read different dimensions of one
    input as their sequence; the choice is the user's then.
    """
    inputs = graph.find_nodes(op="placeholder")
    kept_nodes = kept_inputs(graph)
    values = (fake_value(x) for x in inputs if x not in kept_nodes)
    if any(isinstance(x, DTensor) and _has_axis(x, mesh) for x in values):
        return {}
    paths = {x: argument_path(x, frame) for x in inputs if x not in kept_nodes}
    names = {x: ".".join(path) for x, path in paths.items() if path is not None}
    operands = [x for node in all_nodes(graph) for x in token_operands(node)]
    patterns: list[AttentionPattern | AttentionWithWeights] = [
        *attention_patterns(graph),
        *attention_with_weights(graph),
    ]
    if not names:
        return {}
    if not (operands or patterns or frame.is_part):
        operands = [*_looked_up(graph)]
    fake_mode = fake_mode_of(graph)
    named: dict[fx.Node, tuple[str, int]] = {}
    unclear: dict[str, list[int]] = {}
    called = SequenceDims(graph, operands, fake_mode, mesh, axis)
    for node, dims in _dims_of(names, called):
        if len(dims) > 1:
            joined = _joined(node, set(names), operands, called)
            dims = [dim for dim in dims if dim in joined] or dims
        if len(dims) == 1:
            named[node] = (names[node], dims[0])
        else:
            unclear[names[node]] = sorted(dims)
    if unclear and not frame.is_part:
        raise InputError(_several(frame, dict(named.values()), unclear))
    attended = over_sequences(graph, patterns, fake_mode, mesh, axis, set(names), set())
    written = [x for call in attended for x in call.tokens]
    written_dims = SequenceDims(graph, written, fake_mode, mesh, axis)
    for node, dims in _dims_of(names, written_dims):
        # An input with several dims gets none: attention by hand may stay as it is.
        if node not in named and names[node] not in unclear and len(dims) == 1:
            named[node] = (names[node], dims[0])
    image_rows = ImageRows(graph, fake_mode, mesh, axis)
    products = image_rows.of_tokens([*operands, *written])
    rows = [x for x, count in products.items() if count > 1]
    if not (named or products or frame.is_part):
        rows = image_rows.of_convolutions()
    for node, dim in rows:
        if node in names and names[node] not in unclear:
            named.setdefault(node, (names[node], dim))
    return named


def _looked_up(graph: fx.Graph) -> Iterator[tuple[fx.Node, int]]:
    """Yield what embeddings look up for [.., tokens] indices, with that dimension.

    Without a product there is nothing to share out.
    """
    if not any(map(is_product, all_nodes(graph))):
        return
    for node in all_nodes(graph):
        if spelled(node) == "embedding":
            indices = fake_value(canonical_call(node).arguments["input"])
            if indices.ndim > 1:
                yield node, indices.ndim - 1


def _dims_of(
    inputs: Iterable[fx.Node], sequence_dims: SequenceDims
) -> Iterator[tuple[fx.Node, list[int]]]:
    """Yield the inputs that carry a sequence, with the dimensions that carry it."""
    for node in inputs:
        dims = [x.dim for x in sequence_dims.candidates(node) if x.outer == 1]
        if dims:
            yield node, dims


def _joined(
    node: fx.Node,
    inputs: set[fx.Node],
    operands: Iterable[tuple[fx.Node, int]],
    sequence_dims: SequenceDims,
) -> set[int]:
    """Return the dimensions of an input whose tokens attention sees with another's."""
    found = set[int]()
    for operand in operands:
        origins = sequence_dims.origins(*operand, set()).nodes
        if any(x in inputs for x, _ in origins if x is not node):
            found.update(dim for x, dim in origins if x is node)
    return found


def _has_axis(x: DTensor, mesh: DeviceMesh) -> bool:
    """Tell whether x lies on the mesh, or on a mesh that includes its axis."""
    own = x.device_mesh
    return own == mesh or mesh.get_group() in own.get_all_groups()


def _several(frame: Frame, clear: dict[str, int], unclear: dict[str, list[int]]) -> str:
    """Return the error text, with every choice of a dimension as an option to copy."""
    what = "; ".join(
        f"{name}: {', '.join(f'dim {dim}' for dim in dims)}"
        for name, dims in unclear.items()
    )
    choices = [
        f'options={{"mesh": mesh, "shard": {_as_text(clear | chosen)}}}'
        for chosen in _choices(unclear)
    ]
    return (
        f"the attention calls of {frame.name} read different dimensions of one input "
        f"as their sequence ({what}); needed one per input, because only one can be "
        f"shared out: say which, by {' or '.join(choices)}"
    )


def _choices(unclear: dict[str, list[int]]) -> list[dict[str, int]]:
    """Return choices: the first, second, ... dimension of every input, or its last."""
    most = max(len(dims) for dims in unclear.values())
    return [
        {name: dims[min(n, len(dims) - 1)] for name, dims in unclear.items()}
        for n in range(most)
    ]


def _as_text(shard: dict[str, int]) -> str:
    return "{" + ", ".join(f'"{name}": {dim}' for name, dim in shard.items()) + "}"
