"""Scores that are written out: a product, and the calls between it and a softmax.

    matmul(q, k.mT) * 0.25 + mask  ->  Scores(product, factor=0.25, terms=(mask,))

A dimension is known by its label in the product and not by its place; views on the way
regroup the leading ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ...flow.dim_rules import order_of
from ...flow.view_chain import Factor, follow, is_copies
from ...graph.calls import canonical_call, spelled
from ...graph.nodes import fake_value
from .arrangement import DimLabels, regrouping
from .matched import Scores, Term
from .other_users import shifts_of, writes_before
from .products import read_product

LOW = -1024.0  # scores are never as low; what is filled in below it hides a key


def read_scores(
    node: fx.Node, reader: fx.Node, more_readers: tuple[fx.Node, ...] = ()
) -> Scores | None:
    """Read a node as scores, where `reader` reads it; None if it is none.

    Every value on the way has one reader, in addition to calls that write to it before.
    The last one may have `more_readers`, if it has no writes and no maximum subtracted.
    """
    shifts = shifts_of(node, reader)
    writes = writes_before(node, {reader, *shifts[:1], *more_readers}, reader)
    if more_readers and (shifts or writes):
        return None
    scores = None if writes is None else _of_call(node)
    for write in writes or ():
        rule = _rule(write)
        if scores is None or rule is None:
            return None
        scores = rule(scores, write, canonical_call(write).arguments, "input")
    return None if scores is None else replace(scores, nodes=(*scores.nodes, *shifts))


def _rule(node: fx.Node) -> _Rule | None:
    return _RULES.get(spelled(node).removesuffix("_"))


def _of_call(node: fx.Node) -> Scores | None:
    product = read_product(node)
    if product is not None:
        value = fake_value(node)
        product_scores = Scores(
            product, product.out_labels, tuple(value.shape), product.factor, (node,)
        )
        if product.added is None:
            return product_scores
        terms = _added(product_scores, product.added, product.added_factor)
        return None if terms is None else replace(product_scores, terms=terms)
    if spelled(node) == "cat":
        return _with_sinks(node)
    rule, arguments = _rule(node), canonical_call(node).arguments
    for name in ("input", "other") if rule is not None else ():
        source = arguments.get(name)
        if isinstance(source, fx.Node):
            scores = read_scores(source, node)
            if scores is not None and rule is not None:
                return rule(scores, node, arguments, name)
    return None


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def _factor(
    scores: Scores, node: fx.Node, arguments: dict[str, Any], name: str
) -> Scores | None:
    """Read scores * c, c * scores or scores / c, of a number or a tensor."""
    other = arguments["other" if name == "input" else "input"]
    divides = spelled(node).startswith("div")
    if divides and (name != "input" or arguments.get("rounding_mode") is not None):
        return None
    value = number_of(other)
    if value is None:
        return _scaled(scores, node, other, "divide" if divides else "scale")
    if value == 0:
        return None
    factor = 1 / value if divides else value
    if (factor < 0 and (_not_scales(scores) or scores.cap)) or scores.sinks is not None:
        return None
    terms = tuple(
        t if t.scales else replace(t, factor=t.factor * factor) for t in scores.terms
    )
    return scores.then(
        node, factor=scores.factor * factor, terms=terms, cap=scores.cap * factor
    )


def _scaled(scores: Scores, node: fx.Node, other: Any, kind: str) -> Scores | None:
    """Read scores * temperature, which may be learned, one for each head."""
    value = fake_value(other)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    if _not_scales(scores) or scores.cap or scores.sinks is not None:
        return None
    labels = _broadcast(scores, value)
    if labels is None:
        return None
    term = Term(kind, other, labels, len(scores.regroupings))
    return scores.then(node, terms=(*scores.terms, term))


def _not_scales(scores: Scores) -> list[Term]:
    return [x for x in scores.terms if not x.scales]


def _capped(
    scores: Scores, node: fx.Node, arguments: dict[str, Any], name: str
) -> Scores | None:
    if _not_scales(scores) or scores.cap or scores.sinks is not None:
        return None
    return scores.then(node, cap=1.0)


def _with_sinks(node: fx.Node) -> Scores | None:
    """Read cat([scores, sinks], -1), with one number per head."""
    arguments = canonical_call(node).arguments
    tensors, ndim = arguments["tensors"], fake_value(node).ndim
    if not isinstance(tensors, list | tuple) or len(tensors) != 2:
        return None
    if arguments["dim"] not in (-1, ndim - 1) or fake_value(tensors[1]).ndim != ndim:
        return None
    scores, column = read_scores(tensors[0], node), fake_value(tensors[1])
    if scores is None or scores.sinks is not None or column.shape[-1] != 1:
        return None
    if scores.shifted or any(map(_is_shift, scores.terms)):
        return None
    links = follow(_unexpanded(tensors[1]))
    first, last = links[0], links[-1]
    of_data = [
        dim for dim, factors in enumerate(last.dims) if any(map(_is_data, factors))
    ]
    base = fake_value(first.node)
    if ndim < 4 or of_data != [ndim - 3] or base.numel() != column.shape[ndim - 3]:
        return None
    shape = tuple(fake_value(node).shape)
    return scores.then(node, shape=shape, sinks=first.node)


def _unexpanded(node: fx.Node) -> fx.Node:
    """Return a tensor before it is expanded, also where a size is a symbol."""
    call = canonical_call(node)
    if call.name not in ("expand", "expand_as", "broadcast_to"):
        return node
    source: fx.Node = call.arguments["input"]
    return source if fake_value(source).ndim == fake_value(node).ndim else node


def _is_shift(term: Term) -> bool:
    return term.kind == "add" and fake_value(term.node).shape[-1:] in ((), (1,))


def _is_data(factor: Factor) -> bool:
    return not is_copies(factor)


def _plus(
    scores: Scores, node: fx.Node, arguments: dict[str, Any], name: str
) -> Scores | None:
    other = arguments["other" if name == "input" else "input"]
    if not isinstance(other, fx.Node):
        number = _is_number(other)
        return scores.then(node, shifted=True) if number else None
    factor, alpha = 1.0, arguments.get("alpha", 1)
    if spelled(node).startswith("sub"):
        if name != "input":
            return None
        factor = -1.0
    value = fake_value(other)
    if not isinstance(value, Tensor) or not _is_number(alpha):
        return None
    if scores.sinks is not None and value.shape[-1:] != (1,):
        return None
    terms = _added(scores, other, factor * alpha)
    return None if terms is None else scores.then(node, terms=terms)


def _added(scores: Scores, other: fx.Node, factor: float) -> tuple[Term, ...] | None:
    value = fake_value(other)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    labels = _broadcast(scores, value)
    if labels is None:
        return None
    term = Term("add", other, labels, len(scores.regroupings), factor)
    return (*scores.terms, term)


def _broadcast(scores: Scores, value: Tensor) -> DimLabels | None:
    """Return the labels of a tensor that meets scores; None if it enlarges them."""
    if value.ndim > len(scores.shape):
        return None
    mine = scores.shape[len(scores.shape) - value.ndim :]
    if any(n not in (1, m) for n, m in zip(value.shape, mine, strict=True)):
        return None
    return scores.labels[len(scores.labels) - value.ndim :]


def _filled(
    scores: Scores, node: fx.Node, arguments: dict[str, Any], name: str
) -> Scores | None:
    """Read scores.masked_fill(hidden, low)."""
    if name != "input":
        return None
    return _hidden(scores, node, arguments["mask"], arguments["value"], "hide")


def _chosen(
    scores: Scores, node: fx.Node, arguments: dict[str, Any], name: str
) -> Scores | None:
    """Read where(visible, scores, low), or where(hidden, low, scores)."""
    other = arguments["other" if name == "input" else "input"]
    kind = "show" if name == "input" else "hide"
    return _hidden(scores, node, arguments["condition"], other, kind)


def _hidden(
    scores: Scores, node: fx.Node, mask: Any, value: Any, kind: str
) -> Scores | None:
    number = None if scores.sinks is not None else number_of(value)
    if number is None or not number <= LOW or not isinstance(mask, fx.Node):
        return None
    mask_value = fake_value(mask)
    if mask_value.dtype != torch.bool:
        return None
    labels = _broadcast(scores, mask_value)
    if labels is None:
        return None
    term = Term(kind, mask, labels, len(scores.regroupings), number=number)
    return scores.then(node, terms=(*scores.terms, term))


def number_of(x: Any) -> float | None:
    """Return a number, also if it is a constant of one element that the graph makes."""
    if _is_number(fake_value(x)):
        return float(fake_value(x))
    if isinstance(x, fx.Node) and spelled(x) in ("full", "tensor", "scalar_tensor"):
        arguments, value = canonical_call(x).arguments, fake_value(x)
        values = [arguments.get(name) for name in ("fill_value", "t", "s")]
        numbers = [n for n in values if _is_number(n)]
        if len(numbers) == 1 and value.numel() == 1 and value.is_floating_point():
            return float(torch.tensor(numbers[0], dtype=value.dtype))
    return None


def _converted(
    scores: Scores, node: fx.Node, arguments: dict[str, Any], name: str
) -> Scores | None:
    """Read a change of dtype or of memory."""
    return scores.then(node) if fake_value(node).is_floating_point() else None


def _regrouped(
    scores: Scores, node: fx.Node, arguments: dict[str, Any], name: str
) -> Scores | None:
    shape = tuple(fake_value(node).shape)
    if shape == scores.shape:
        return scores.then(node)
    how = regrouping(scores.labels, scores.shape, shape)
    if how is None or scores.sinks is not None:
        return None
    return scores.then(
        node,
        labels=(*how.after, *scores.labels[-2:]),
        shape=shape,
        regroupings=(*scores.regroupings, how),
    )


def _permuted(
    scores: Scores, node: fx.Node, arguments: dict[str, Any], name: str
) -> Scores | None:
    order = order_of(node)
    if order is None or scores.sinks is not None:
        return None
    labels = tuple(scores.labels[i] for i in order)
    return scores.then(node, labels=labels, shape=tuple(fake_value(node).shape))


_Rule = Callable[[Scores, fx.Node, dict[str, Any], str], Scores | None]
VIEWS = ("view", "reshape", "unflatten", "flatten", "unsqueeze", "squeeze", "view_as",
          "reshape_as", "_unsafe_view")  # fmt: skip
CONVERSIONS = ("to", "contiguous", "clone", "_to_copy")
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("mul", "div"), _factor),
    **dict.fromkeys(("add", "sub"), _plus),
    "tanh": _capped,
    "masked_fill": _filled,
    "where": _chosen,
    **dict.fromkeys(CONVERSIONS, _converted),
    **dict.fromkeys(VIEWS, _regrouped),
    **dict.fromkeys(("transpose", "permute", "mT"), _permuted),
}
