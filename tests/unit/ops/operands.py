"""Small operands of the attention operators."""

import torch


def make_operands(dtype, kv_heads, q_len=6, kv_len=6, dims=(8, 8)):
    """q [2, 4, q_len, D], k [2, kv_heads, kv_len, D] and v [2, kv_heads, kv_len, E]."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, q_len, dims[0], dtype=dtype)
    k = torch.randn(2, kv_heads, kv_len, dims[0], dtype=dtype)
    v = torch.randn(2, kv_heads, kv_len, dims[1], dtype=dtype)
    return q, k, v
