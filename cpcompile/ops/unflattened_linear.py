"""Products that keep batch and tokens apart, which AOTAutograd flattens.

    view(x, [B*S, K]) @ w, view(.., [B, S, N])  ->  cp.linear(x, w)
    view(dy, [B*S, N]).T @ view(x, [B*S, K])    ->  cp.weight_gradient(dy, x)

A shard of tokens is no shard of batch and tokens together. These two stand in a graph
of the whole sequence. On the part of a rank both are what they were, so that no
compiler sees them: `DECOMPOSED` says what they become.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("cp::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [.., K] by weight [K, N]."""
    return _linear(x, weight)


@torch.library.custom_op("cp::weight_gradient", mutates_args=())
def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return [N, K]: outer products of [.., N] and [.., K], summed over tokens."""
    return _weight_gradient(grad, x)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    rows = torch.mm(x.reshape(-1, x.shape[-1]), weight)
    return rows.view(*x.shape[:-1], weight.shape[-1])


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    rows, of_x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    return torch.mm(rows.t(), of_x)


linear.register_fake(_linear)
weight_gradient.register_fake(_weight_gradient)

LINEAR = torch.ops.cp.linear.default
WEIGHT_GRADIENT = torch.ops.cp.weight_gradient.default
DECOMPOSED = {LINEAR: _linear, WEIGHT_GRADIENT: _weight_gradient}
