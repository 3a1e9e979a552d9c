"""Formulas of torch for functions that are better not kept whole.

A depthwise convolution needs a few tokens of the neighbour, which the compiler borrows
where it sees the convolution. A call that does a convolution, a scan and projections
at once is independent along no dimension: its parts are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

_FUSED = (
    "mamba_split_conv1d_scan_combined",
    "mamba2_split_conv1d_scan_combined",
    "mamba_inner_fn",
)


def in_torch(function: Any) -> Callable[..., Any] | None:
    """Return what is called in place of a function of these packages, or None."""
    package = (getattr(function, "__module__", None) or "").partition(".")[0]
    name = getattr(function, "__name__", None)
    if package == "transformers" and (name in _FUSED or name == "causal_conv1d_fn"):
        # Beside the kernel there is what transformers computes without it. Where that
        # is nothing, the model calls the parts one by one.
        return getattr(function, "__wrapped__", None)
    if package == "causal_conv1d" and name == "causal_conv1d_fn":
        return causal_convolution
    return None


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: None = None,
    initial_states: None = None,
    return_final_states: bool = False,
    final_states_out: None = None,
    activation: str | None = None,
) -> Tensor:
    """Return a depthwise convolution over earlier tokens, as causal_conv1d_fn does.

    Args:
        x: [B, C, S]. weight: [C, K]. bias: [C]. activation: None, "silu" or "swish".

    Returns: [B, C, S], in the dtype of x.
    """
    size, width = x.shape[-1], weight.shape[1]
    y = F.conv1d(
        x.to(weight.dtype),
        weight.unsqueeze(1),
        bias,
        padding=width - 1,
        groups=weight.shape[0],
    )[..., :size]
    return (F.silu(y) if activation in ("silu", "swish") else y).to(x.dtype)
