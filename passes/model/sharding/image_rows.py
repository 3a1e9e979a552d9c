"""Find the rows of images, or the samples of sounds, that tokens are made of.

    x -> conv -> norm -> pool -> conv -> flatten(2) -> transpose -> attention
    2     2       2       2       2          2             1            2

Tokens begin where positions are flattened, or where a convolution makes fewer of them
(sequence_dims). What is before that has the rows of a grid, from which a rank's tokens
are made with a few rows of its neighbours (strided_windows).

An input is shared out by rows only if more than one convolution reads them: where one
makes patches, that is little work, and ranks that cut its result have even numbers of
tokens, however few rows there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch.fx as fx
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cpcompile.geometry.layout import leaves_ranks_empty
from cpcompile.torch_private.fake_tensors import FakeTensorMode

from ...graph.calls import canonical_call, spelled
from ...graph.nodes import all_nodes, expected_shape, fake_value
from ..moves.window_views import windows
from ..normalize.pad_convolutions import CONVOLUTIONS
from .norm_rules import RULES as NORMS
from .sequence_dims import SequenceDims
from .strided_windows import RULES as WINDOWS

Rows = tuple[fx.Node, int]
"""A value, and its dimension of rows."""


def image_rows(
    graph: fx.Graph,
    tokens: Iterable[Rows],
    fake_mode: FakeTensorMode,
    mesh: DeviceMesh,
    axis: int,
) -> Iterator[Rows]:
    """Yield the inputs of a graph with the rows that tokens are made of."""
    rows: dict[fx.Node, set[int]] = {}
    asked: set[Rows] = set()
    questions = list(tokens)
    while questions:
        asked.update(questions)
        dims = SequenceDims(graph, questions, fake_mode, mesh, axis)
        found = {
            (node, sequence.dim.dim)
            for node, sequences in dims.found.items()
            for sequence in sequences
            if sequence.dim.outer == 1
        }
        for node, dim in found:
            rows.setdefault(node, set()).add(dim)
        before = {_before(node, dim) for node, dim in found if node in dims.begins}
        questions = [x for x in before - asked if x is not None]
    for node in graph.find_nodes(op="placeholder"):
        own = rows.get(node, set())
        if len(own) == 1 and len(_convolutions_after(node, rows)) > 1:
            (dim,) = own
            if not leaves_ranks_empty(_shape(node)[dim], mesh.size(axis)):
                yield node, dim


def convolved_rows(graph: fx.Graph) -> Iterator[Rows]:
    """Yield the results of convolutions of positions, with the last but one of these.

    The only one, where there are no two.
    """
    for node in all_nodes(graph):
        if spelled(node) in CONVOLUTIONS:
            weight = canonical_call(node).arguments["weight"]
            positions = len(_shape(weight)) - 2
            yield node, len(_shape(node)) - min(positions, 2)


def _before(node: fx.Node, dim: int) -> Rows | None:
    """Return the rows that a call makes rows or tokens of, where it has some."""
    name = spelled(node)
    if name in CONVOLUTIONS or name in WINDOWS or name in NORMS:
        source = canonical_call(node).arguments["input"]
        return source, dim
    if not isinstance(source := (node.args or (None,))[0], fx.Node):
        return None
    after, before = _shape(node), _shape(source)
    if _joins(name) and dim < len(before) and windows(after, before, dim) is not None:
        return source, dim
    return None


def _joins(name: str) -> bool:
    return name in ("view", "reshape", "flatten")


def _convolutions_after(node: fx.Node, rows: dict[fx.Node, set[int]]) -> set[fx.Node]:
    """Return the convolutions that read the rows of a value, and what is made of it."""
    open_nodes, seen = [node], {node}
    while open_nodes:
        for user in open_nodes.pop().users:
            if user in rows and user not in seen:
                seen.add(user)
                open_nodes.append(user)
    return {x for x in seen if spelled(x) in CONVOLUTIONS}


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = fake_value(node)
    return expected_shape(value) if isinstance(value, Tensor) else ()
