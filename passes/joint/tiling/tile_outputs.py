"""Tell what leaves a tile: results for its tokens, sums so far, operands of products.

    dW = mm(t(dlogits), h)   ->   tile: dlogits;   outside: dW += mm(t(dlogits), h)

A sum over tokens that is a product of matrices, such as the gradient of a weight, is
added up outside of the tile, where Inductor can do it in place. So it exists once, and
it begins with the first product, not with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from ...flow.dim_maps import SUM
from .tile_regions import RegionPart, bytes_of, is_view

aten = torch.ops.aten


@dataclass(frozen=True)
class Leaving:
    """The calls of a part whose values others need.

    results: values with tokens. sums: sums over tokens, to which every tile adds.
    products: sums that are made outside. operands: the operands of products, as far as
    a tile makes them. first: the smallest value that the forward needs, if gradients
    are computed in it too.
    """

    results: tuple[fx.Node, ...]
    sums: tuple[fx.Node, ...]
    products: tuple[fx.Node, ...]
    operands: tuple[fx.Node, ...]
    first: fx.Node | None = None

    @classmethod
    def of(cls, part: RegionPart) -> Leaving:
        every = [x for x in part.outputs if part.result(x) is SUM]
        products = [x for x in every if _is_product(x, part)]
        results = [x for x in part.outputs if x not in every]
        bases = {
            base: None
            for x in products
            for y in x.all_input_nodes
            if (base := _base(y, part)) in part.nodes and base not in results
        }
        sums = tuple(x for x in every if x not in products)
        early = [x for x in part.outputs if x not in part.scaled]
        first = min(early, key=bytes_of, default=None)
        if part.gradient is None:
            first = None
        return cls(tuple(results), sums, tuple(products), tuple(bases), first)

    @property
    def of_a_tile(self) -> tuple[fx.Node, ...]:
        """Values that one call of a tile returns."""
        return (*self.results, *self.sums, *self.operands)


def _is_product(node: fx.Node, part: RegionPart) -> bool:
    if node.target is not aten.mm.default or len(node.all_input_nodes) != 2:
        return False
    return not any(user in part.nodes for user in node.users)


def _base(node: fx.Node, part: RegionPart) -> fx.Node:
    """Return the value that a value is a view of.

    A tile returns no views of its operands.
    """
    while node in part.nodes and len(node.all_input_nodes) == 1 and is_view(node):
        (node,) = node.all_input_nodes
    return node
