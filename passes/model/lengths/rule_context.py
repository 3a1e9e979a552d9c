"""Interface of the reader that the rules of calls use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch.fx as fx

from ...graph.sequence_tokens import Tokens
from .masking import PaddingMasker
from .padded_tokens import Found
from .sizes import Sizes

Given = dict[fx.Node, Tokens]


class RuleContext(Protocol):
    """Attributes and methods of Reader that rules use; see there."""

    found: dict[fx.Node, Found]
    sizes: Sizes
    masker: PaddingMasker
    writes: list[fx.Node]  # calls in place, of all graphs

    def traced(self, node: fx.Node, given: Given) -> Found: ...

    def filled(self, at: fx.Node, node: fx.Node, number: Any) -> fx.Node: ...

    def replaced(self, node: fx.Node, new: fx.Node) -> None: ...


Rule = Callable[[RuleContext, fx.Node, dict[str, Any], Given], Found]
