"""The views by which a write gets to a part of a tensor.

    k[:, 2:][..., :5] = a       getitem (:, 2:), getitem (..., :5)

Calls of views are kept as steps, which can be made again of a copy of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ...graph.calls import function_of
from ...graph.constant_arguments import Callee, ConstantArgument


@dataclass(frozen=True, repr=False)
class ViewStep(ConstantArgument):
    """A call of a view: what it calls, arguments after its source, and keywords."""

    callee: Callee
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, node: fx.Node) -> ViewStep:
        """Return the call of a node."""
        return cls(Callee(function_of(node)), node.args[1:], node.kwargs)

    @property
    def label(self) -> str:  # type: ignore[override]
        return self.callee.label

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:  # type: ignore[override]
        return self.callee.functions

    def text(self) -> str:
        return f"{self.callee} {self.args} {self.kwargs}"


def viewed(x: Any, steps: Sequence[ViewStep]) -> Any:
    """Return the view of `x` to which the steps lead."""
    for step in steps:
        x = step.callee(x, *step.args, **step.kwargs)
    return x


def written(whole: Tensor, part: Any, steps: Sequence[ViewStep]) -> Tensor:
    """Return a copy of `whole` with `part` where the steps lead; differentiable."""
    copy = whole.clone(memory_format=torch.contiguous_format)
    view = viewed(copy, steps)
    if isinstance(part, Tensor):
        view.copy_(part)
    else:
        view.fill_(part)
    return copy
