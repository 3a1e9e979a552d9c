"""Products of two tensors by the labels of their dimensions, as einsum has them.

matmul(q, k.mT)    baddbmm(b, q, k.mT)    einsum("bhid,bhjd->bhij", q, k)
  ->  Product(left="bhid", right="bhjd", out="bhij")
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.fx as fx

from ...flow.dim_rules import order_of, product_map
from ...graph.calls import canonical_call, spelled
from .arrangement import Arranged, DimLabels


@dataclass(frozen=True)
class Product:
    """The product out = factor * sum of left * right over the labels that out lacks.

    added: a tensor that is added to it, times `added_factor`.
    """

    left: fx.Node
    right: fx.Node
    left_labels: DimLabels
    right_labels: DimLabels
    out_labels: DimLabels
    factor: float = 1.0
    added: fx.Node | None = None
    added_factor: float = 1.0

    @property
    def operands(self) -> tuple[Arranged, Arranged]:
        """Left and right, as they were before they were transposed for the product."""
        lhs = untransposed(Arranged(self.left, self.left_labels))
        return lhs, untransposed(Arranged(self.right, self.right_labels))

    @property
    def summed(self) -> set[str]:
        """Labels that the result does not have."""
        return {*self.left_labels, *self.right_labels} - {*self.out_labels}


def untransposed(x: Arranged) -> Arranged:
    """Return the source of a node, before transposes and permutations."""
    while (order := order_of(x.node)) is not None:
        source = canonical_call(x.node).arguments["input"]
        labels = [""] * len(order)
        for place, dim in enumerate(order):
            labels[dim] = x.labels[place]
        x = Arranged(source, tuple(labels))
    return x


def read_product(node: fx.Node) -> Product | None:
    """Read the product that a node computes; None if it is none of two tensors."""
    call_map = product_map(node)
    if call_map is None or spelled(node) == "addmm":
        return None
    (lhs, lhs_labels), (rhs, rhs_labels), *added = call_map.operands
    read = Product(lhs, rhs, lhs_labels, rhs_labels, call_map.result)
    if not added:
        return read
    arguments = canonical_call(node).arguments
    beta, alpha = arguments["beta"], arguments["alpha"]
    if not isinstance(beta, int | float) or not isinstance(alpha, int | float):
        return None
    if not beta:
        return replace(read, factor=alpha)
    return replace(read, factor=alpha, added=added[0][0], added_factor=beta)
