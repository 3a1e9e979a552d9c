"""Find the rows of images, or the samples of sounds, that tokens are made of.

    x -> conv -> norm -> pool -> conv -> flatten(2) -> transpose -> attention
    2     2       2       2       2          2             1            2

Tokens begin where positions are flattened or cut into windows, or where a convolution
makes fewer of them (sequence_dims). What is before that has the rows of a grid, of
which each rank may have its own, with a few of its neighbours (window_rules).

An input is shared out by rows only if there is more than one product between it and
attention: where one alone makes patches, that is little work, and ranks that cut its
result have even numbers of tokens, however few rows there are. Where no attention says
what tokens are, rows are all that can be shared out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

import torch.fx as fx
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cpcompile.geometry.layout import leaves_ranks_empty
from cpcompile.passes.graph.calls import canonical_call, spelled
from cpcompile.passes.graph.nodes import all_nodes, expected_shape, fake_value, reached
from cpcompile.passes.model.patterns.unmatched import is_product
from cpcompile.passes.model.tokens.convolutions import CONVOLUTIONS
from cpcompile.passes.model.tokens.dim_flows import rows_before
from cpcompile.passes.model.tokens.sequence_dims import SequenceDims
from cpcompile.torch_private.fake_tensors import FakeTensorMode

Rows = tuple[fx.Node, int]
"""A value, and its dimension of rows."""


@dataclass(frozen=True)
class ImageRows:
    """Answers for one graph, on a mesh axis that shares rows out."""

    graph: fx.Graph
    fake_mode: FakeTensorMode
    mesh: DeviceMesh
    axis: int

    def of_tokens(self, tokens: Iterable[Rows]) -> dict[Rows, int]:
        """Return the inputs with the rows that tokens are made of.

        Each with the number of products on the way.
        """
        dims = self._dims(tokens)
        rows = self._rows(self._begun(dims))
        makers = rows.keys() | dims.begins
        return {x: len(_products_after(x[0], makers)) for x in self._inputs(rows)}

    def of_convolutions(self) -> list[Rows]:
        """Return the inputs with rows that convolutions read.

        Of two dimensions of positions these are along the first. None, if there is no
        other product to share out.
        """
        products = [x for x in all_nodes(self.graph) if is_product(x)]
        convolutions = [x for x in products if spelled(x) in CONVOLUTIONS]
        if len(products) < 2:
            return []
        return [*self._inputs(self._rows({_read(x) for x in convolutions}))]

    def _rows(self, questions: set[Rows]) -> dict[fx.Node, set[int]]:
        """Return these rows and those that they are made of, by value."""
        rows: dict[fx.Node, set[int]] = {}
        asked: set[Rows] = set()
        while questions:
            asked |= questions
            dims = self._dims(questions)
            for node, dim in _whole_dims(dims):
                rows.setdefault(node, set()).add(dim)
            questions = self._begun(dims) - asked
        return rows

    def _inputs(self, rows: dict[fx.Node, set[int]]) -> Iterator[Rows]:
        """Yield the inputs with one dimension of rows, of which all ranks get some."""
        for node in self.graph.find_nodes(op="placeholder"):
            own = rows.get(node, set())
            if len(own) == 1:
                (dim,) = own
                if not leaves_ranks_empty(_shape(node)[dim], self.mesh.size(self.axis)):
                    yield node, dim

    def _dims(self, questions: Iterable[Rows]) -> SequenceDims:
        on = (self.fake_mode, self.mesh, self.axis)
        return SequenceDims(self.graph, list(questions), *on)

    def _begun(self, dims: SequenceDims) -> set[Rows]:
        """Return the rows of which values are made where tokens, or rows, begin."""
        found = {rows_before(*x) for x in _whole_dims(dims) if x[0] in dims.begins}
        return {x for x in found if x is not None}


def _whole_dims(dims: SequenceDims) -> list[Rows]:
    """Return the values that have tokens, with each dimension of these."""
    return [
        (node, sequence.dim.dim)
        for node, sequences in dims.found.items()
        for sequence in sequences
        if sequence.dim.outer == 1
    ]


def _read(convolution: fx.Node) -> Rows:
    """Return the rows that a convolution reads."""
    given = canonical_call(convolution).arguments
    positions = len(_shape(given["weight"])) - 2
    return given["input"], len(_shape(given["input"])) - min(positions, 2)


def _products_after(node: fx.Node, among: Set[fx.Node]) -> list[fx.Node]:
    """Return the products that are made of a value, and of what is made of it."""
    return [*filter(is_product, reached([node], lambda x: among & x.users.keys()))]


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = fake_value(node)
    return expected_shape(value) if isinstance(value, Tensor) else ()
