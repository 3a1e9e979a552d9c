"""What is known of scores while they are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.fx as fx

from cpcompile.passes.written.arrangement import Labels, Regrouping
from cpcompile.passes.written.products import Product


@dataclass(frozen=True)
class Term:
    """What is added to the scores, or which of them are hidden.

    node: with `labels`; `regrouped` regroupings of the scores came before it.
    kind: "add", times `factor`; "hide", where it is True, by `number` times `factor`;
    "show", where it is True, and elsewhere the same.
    """

    kind: str
    node: fx.Node
    labels: Labels
    regrouped: int
    factor: float = 1.0
    number: float = 0.0

    @property
    def low(self) -> bool:
        """Whether it hides by a finite number."""
        return self.kind != "add" and self.number != float("-inf")


@dataclass(frozen=True)
class Scores:
    """The scores of a product as they are after some calls.

    labels: of their dimensions. nodes: the calls, the product first. cap: what tanh of
    them is multiplied by, 0 without tanh; factor counts what comes behind it too.
    sinks: the last column, which is no key. shifted: whether a number was added, which
    changes a softmax only if sinks come behind it.
    """

    product: Product
    labels: Labels
    shape: tuple[int, ...]
    factor: float
    nodes: tuple[fx.Node, ...]
    terms: tuple[Term, ...] = ()
    regroupings: tuple[Regrouping, ...] = ()
    cap: float = 0.0
    sinks: fx.Node | None = None
    shifted: bool = False

    def then(self, node: fx.Node, **changes: Any) -> Scores:
        """After one more call."""
        return replace(self, nodes=(*self.nodes, node), **changes)
