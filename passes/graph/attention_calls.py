"""Recognise the nodes that call attention."""

from __future__ import annotations

import torch
import torch.fx as fx

from .calls import spelled


def is_attention(node: fx.Node) -> bool:
    """Tell whether `node` calls scaled_dot_product_attention."""
    return spelled(node) == "scaled_dot_product_attention"


def is_flex_attention(node: fx.Node) -> bool:
    """Tell whether `node` calls flex_attention."""
    return node.target is torch.ops.higher_order.flex_attention
