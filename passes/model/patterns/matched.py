"""Records of scores, and of attention, while they are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.fx as fx

from .arrangement import Arranged, DimLabels, Regrouping
from .products import Product


@dataclass(frozen=True)
class Term:
    """A value that is added to the scores, or a mask that hides some of them.

    node: with `labels`; `regrouped` regroupings of the scores came before it.
    kind: "scale" or "divide", the scores are multiplied or divided by the node, before
        anything else; "add", the node times `factor` is added; "hide", `number` times
        `factor` hides where the node is True; "show", the same hides where it is False.
    """

    kind: str
    node: fx.Node
    labels: DimLabels
    regrouped: int
    factor: float = 1.0
    number: float = 0.0

    @property
    def low(self) -> bool:
        """True if the term hides by a finite number."""
        return self.kind in ("hide", "show") and self.number != float("-inf")

    @property
    def scales(self) -> bool:
        """True if scores are multiplied or divided by the node."""
        return self.kind in ("scale", "divide")


@dataclass(frozen=True)
class Scores:
    """The scores of a product as they are after some calls.

    labels: of their dimensions. nodes: the calls, the product first. cap: what tanh of
    them is multiplied by, 0 without tanh; factor also counts what comes after it.
    sinks: the last column, which is no key. shifted: whether a number was added, which
    changes a softmax only if sinks come after it.
    """

    product: Product
    labels: DimLabels
    shape: tuple[int, ...]
    factor: float
    nodes: tuple[fx.Node, ...]
    terms: tuple[Term, ...] = ()
    regroupings: tuple[Regrouping, ...] = ()
    cap: float = 0.0
    sinks: fx.Node | None = None
    shifted: bool = False

    def then(self, node: fx.Node, **changes: Any) -> Scores:
        """Return the scores after one more call."""
        return replace(self, nodes=(*self.nodes, node), **changes)


@dataclass(frozen=True)
class AttentionPattern:
    """Attention as it is read: softmax(factor * q k' + mask) v.

    scales: tensors by which scores are multiplied or divided, the same for all keys,
        [*leading, i or 1, 1], so that they may meet the queries instead.
    cap, sinks: see Scores. dropout_p: of dropout on the weights. lse: the log-sum-exp
    of the scores, if it is read too.

    q: [*leading, i, d], k: [*leading, j, d], v: [*leading, j, e]; the terms of the mask
        are arranged alike, [*leading, i, j].
    after: the regroupings of the leading dimensions of the result [*leading, i, e], and
        `labels`: the order of its dimensions after them.
    tokens: the operands as they are in the graph, each with its dimension of tokens.
    nodes: all calls, in order; the last one is the second product.
    """

    q: Arranged
    k: Arranged
    v: Arranged
    factor: float
    cap: float
    sinks: fx.Node | None
    dropout_p: float
    terms: tuple[tuple[Term, Arranged], ...]
    after: tuple[Regrouping, ...]
    labels: DimLabels
    tokens: tuple[tuple[fx.Node, int], ...]
    nodes: tuple[fx.Node, ...]
    scales: tuple[tuple[Term, Arranged], ...] = ()
    lse: fx.Node | None = None

    @property
    def out(self) -> fx.Node:
        """Node of the second product."""
        return self.nodes[-1]
