"""Read a call of a loss: which values it compares, and how it adds up.

nn.MSELoss()(x, y)    F.mse_loss(x, y)    torch._C._nn.mse_loss(x, y, 1)
  ->  LossCall(F.mse_loss, x, y, "mean", {"weight": None})
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.fx as fx
import torch.nn.functional as F

# Private, seen in 2.11 to 2.13: what the deprecated size_average and reduce mean.
from torch.nn import _reduction

from .calls import Call, canonical_call

# Losses with a value per element of an input and a target of one shape.
ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "mse_loss": F.mse_loss,
    "l1_loss": F.l1_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "kl_div": F.kl_div,
    "binary_cross_entropy": F.binary_cross_entropy,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "soft_margin_loss": F.soft_margin_loss,
    "poisson_nll_loss": F.poisson_nll_loss,
}
# Losses with a value per token, for scores of classes in dimension 1.
OF_CLASSES: dict[str, Callable[..., Any]] = {
    "cross_entropy": F.cross_entropy,
    "nll_loss": F.nll_loss,
}
# Losses whose mean divides by the sum of the weights of elements.
MEAN_BY_WEIGHT = (F.mse_loss, F.l1_loss)

_HOW = ("input", "target", "reduction", "size_average", "reduce")
_REDUCTIONS = ("none", "mean", "sum")  # aten's numbers


@dataclass(frozen=True)
class LossCall:
    """A call of a loss, as torch.nn.functional has it.

    options: all other arguments by name, weights among them.
    """

    function: Callable[..., Any]
    input: Any
    target: Any
    reduction: str
    options: dict[str, Any]


def loss_call(node: fx.Node) -> LossCall | None:
    """Return the call of a loss that a node makes; None if it makes none known here."""
    call = canonical_call(node)
    function = ELEMENTWISE.get(call.name) or OF_CLASSES.get(call.name)
    reduction = reduction_of(call)
    if function is None or reduction is None:
        return None
    options = {k: x for k, x in call.arguments.items() if k not in _HOW}
    arguments = call.arguments
    return LossCall(
        function, arguments["input"], arguments["target"], reduction, options
    )


def reduction_of(call: Call) -> str | None:
    """Return how a loss adds up; None if the call says that in no way known here."""
    reduction = call.arguments.get("reduction")
    average, reduce = (call.arguments.get(x) for x in ("size_average", "reduce"))
    if average is not None or reduce is not None:
        if reduction == "batchmean":
            return None  # torch divides by the batch in addition
        reduction = _reduction.legacy_get_string(average, reduce, emit_warning=False)
    if isinstance(reduction, int) and 0 <= reduction < len(_REDUCTIONS):
        return _REDUCTIONS[reduction]
    return reduction if isinstance(reduction, str) else None
