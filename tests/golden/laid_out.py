"""Attention whose tokens may be laid out."""

import torch.nn.functional as F


def attend(x):
    """Causal attention of x [B, S, C] to itself, with two heads."""
    q = x.unflatten(-1, (2, -1)).transpose(1, 2)
    y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return y.transpose(1, 2).flatten(2)
