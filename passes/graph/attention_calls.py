"""Which nodes call attention."""

from __future__ import annotations

import torch.fx as fx

from cpcompile.passes.graph.calls import spelled


def is_attention(node: fx.Node) -> bool:
    """Whether `node` calls scaled_dot_product_attention."""
    return spelled(node) == "scaled_dot_product_attention"
