"""Recognise the nodes that call attention."""

from __future__ import annotations

import torch
import torch.fx as fx

from .calls import canonical_call, spelled


def is_attention(node: fx.Node) -> bool:
    """Tell whether `node` calls scaled_dot_product_attention."""
    return spelled(node) == "scaled_dot_product_attention"


def is_flex_attention(node: fx.Node) -> bool:
    """Tell whether `node` calls flex_attention."""
    return node.target is torch.ops.higher_order.flex_attention


def attention_operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Return the query, key and value of an attention call, however they are passed."""
    arguments = canonical_call(node).arguments
    q, k, v = (arguments[name] for name in ("query", "key", "value"))
    assert isinstance(q, fx.Node) and isinstance(k, fx.Node) and isinstance(v, fx.Node)
    return q, k, v
