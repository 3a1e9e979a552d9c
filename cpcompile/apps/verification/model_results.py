"""Collect the tensors that a model returns; make a loss that depends on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def named_tensors(result: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return the floating-point tensors in what a model returns, by their place in it.

    Key/value caches of transformers are opened too.
    """
    if isinstance(result, Tensor):
        return {prefix or "output": result} if result.is_floating_point() else {}
    if isinstance(result, Mapping):
        items = list(result.items())
    elif isinstance(result, tuple | list):
        items = [(str(n), x) for n, x in enumerate(result)]
    elif hasattr(result, "self_attention_cache"):
        items = [("self", result.self_attention_cache)]
        items += [("cross", result.cross_attention_cache)]
    elif hasattr(result, "layers"):
        items = [
            (f"cache.{n}.{part}", getattr(layer, part))
            for n, layer in enumerate(result.layers)
            for part in ("keys", "values")
        ]
    else:
        return {}
    tensors: dict[str, Tensor] = {}
    for name, value in items:
        tensors |= named_tensors(value, f"{prefix}.{name}" if prefix else str(name))
    return tensors


def loss_of(results: Mapping[str, Tensor], name: str = "loss") -> Tensor:
    """Return the model's loss, or a weighted sum of all results with gradients.

    Every element of these results counts; caches are left out.
    """
    if name in results:
        return results[name]
    terms = [x for n, x in results.items() if x.requires_grad and "cache" not in n]
    loss: Tensor = torch.stack([(x * _weights(x)).sum() for x in terms]).sum()
    return loss


def _weights(x: Tensor) -> Tensor:
    steps = torch.arange(x.numel(), dtype=torch.float64, device=x.device)
    weights: Tensor = torch.sin(0.7 * steps + 1) / x.numel() ** 0.5
    return weights.to(x.dtype).view(x.shape)
