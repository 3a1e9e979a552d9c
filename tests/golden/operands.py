"""Operands of attention, and how models make and merge them."""

import torch
import torch.nn.functional as F

sdpa = F.scaled_dot_product_attention
QKV = {"q": 2, "k": 2, "v": 2}  # what to shard, in functions of q, k and v


def make_qkv(*shape, kv_heads=None):
    kv_shape = list(shape)
    if kv_heads is not None:
        kv_shape[1] = kv_heads
    return torch.randn(shape), torch.randn(kv_shape), torch.randn(kv_shape)


def causal(q, k, v):
    return sdpa(q, k, v, is_causal=True)


def heads(x, count=4):
    """[B, S, C] -> [B, H, S, D]"""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def attend(x, count=4):
    """[B, S, C] -> [B, S, C], causal"""
    q = heads(x, count)
    return sdpa(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
