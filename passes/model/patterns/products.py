"""Products of two tensors by the labels of their dimensions, as einsum has them.

matmul(q, k.mT)    baddbmm(b, q, k.mT)    einsum("bhid,bhjd->bhij", q, k)
  ->  Product(left="bhid", right="bhjd", out="bhij")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.fx as fx
from torch import Tensor

from ...graph.calls import canonical_call, spelled
from ...graph.nodes import fake_value
from .arrangement import Arranged, Labels


@dataclass(frozen=True)
class Product:
    """The product out = factor * sum of left * right over the labels that out lacks.

    added: a tensor that is added to it, times `added_factor`.
    """

    left: fx.Node
    right: fx.Node
    left_labels: Labels
    right_labels: Labels
    out_labels: Labels
    factor: float = 1.0
    added: fx.Node | None = None
    added_factor: float = 1.0

    @property
    def operands(self) -> tuple[Arranged, Arranged]:
        """Left and right, as they were before they were transposed for the product."""
        left = untransposed(Arranged(self.left, self.left_labels))
        return left, untransposed(Arranged(self.right, self.right_labels))

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


def order_of(node: fx.Node) -> tuple[int, ...] | None:
    """Return the dimensions of the argument of a transpose or permute, in new order."""
    call = canonical_call(node)
    value = fake_value(node)
    if call.name == "permute":
        return tuple(dim % value.ndim for dim in call.arguments["dims"])
    if call.name in ("mT", "mH", "adjoint", "matrix_H"):
        dims: tuple[int, ...] = (-2, -1)
    elif call.name == "transpose":
        dims = (call.arguments["dim0"], call.arguments["dim1"])
    elif call.name == "t" and value.ndim == 2:
        dims = (0, 1)
    else:
        return None
    order = list(range(value.ndim))
    order[dims[0]], order[dims[1]] = order[dims[1]], order[dims[0]]
    return tuple(order)


def read_product(node: fx.Node) -> Product | None:
    """Read the product that a node computes; None if it is none of two tensors."""
    if spelled(node) == "einsum":
        return _einsum(*node.args) if len(node.args) > 1 else None
    call = canonical_call(node)
    read = _READ.get(call.name)
    return None if read is None else read(call.arguments)


def _matmul(given: dict[str, Any]) -> Product | None:
    operands = [x for x in given.values() if isinstance(x, fx.Node)]
    if len(operands) != 2:
        return None
    left, right = operands
    dims = [_ndim(x) for x in (left, right)]
    if min(dims) < 2:
        return None
    # Dimensions of the batch are aligned at their ends, as torch broadcasts them.
    batch = [f"b{n}" for n in reversed(range(max(dims) - 2))]
    own = [tuple(batch[len(batch) - (n - 2) :]) for n in dims]
    return Product(
        *(left, right, (*own[0], "m", "d"), (*own[1], "d", "n"), (*batch, "m", "n"))
    )


def _baddbmm(given: dict[str, Any]) -> Product | None:
    beta, alpha = given["beta"], given["alpha"]
    if not isinstance(beta, int | float) or not isinstance(alpha, int | float):
        return None
    found = _matmul({"left": given["batch1"], "right": given["batch2"]})
    assert found is not None, "it takes three dimensions"
    labels = (found.left_labels, found.right_labels, found.out_labels)
    added = given["input"] if beta else None
    return Product(found.left, found.right, *labels, alpha, added, beta)


def _einsum(equation: Any, *given: Any) -> Product | None:
    operands = given[0] if isinstance(given[0], list | tuple) else given
    if not isinstance(equation, str) or "->" not in equation or len(operands) != 2:
        return None
    inputs, out = equation.replace(" ", "").split("->")
    terms = zip(inputs.split(","), operands, strict=True)
    left, right = (_expanded(term, _ndim(x)) for term, x in terms)
    if left is None or right is None:
        return None
    dots = [x for x in (*left, *right) if x.startswith(".")]
    most = len({*dots})
    result = _expanded(out, len(out.replace("...", "")) + most * ("..." in out))
    if result is None or any(len({*x}) != len(x) for x in (left, right, result)):
        return None
    return Product(operands[0], operands[1], left, right, result)


def _expanded(term: str, ndim: int) -> Labels | None:
    """Return the labels of one operand, `...` written out from its end."""
    before, dots, after = term.partition("...")
    missing = ndim - len(before) - len(after)
    if missing < 0 or (missing and not dots):
        return None
    return (*before, *(f".{n}" for n in reversed(range(missing))), *after)


def _ndim(node: Any) -> int:
    value = fake_value(node)
    assert isinstance(value, Tensor)
    return value.ndim


_READ: dict[str, Callable[[dict[str, Any]], Product | None]] = {
    "matmul": _matmul,
    "bmm": _matmul,
    "mm": _matmul,
    "baddbmm": _baddbmm,
}
