"""Which nodes call attention."""

from __future__ import annotations

import torch
import torch.fx as fx
import torch.nn.functional as F

ATTENTION_TARGETS = (
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)


def is_attention(node: fx.Node) -> bool:
    """Whether `node` calls scaled_dot_product_attention."""
    return node.op == "call_function" and any(
        node.target is target for target in ATTENTION_TARGETS
    )
