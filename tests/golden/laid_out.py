"""Programs whose tokens are laid out, and what was moved."""

import torch
import torch.nn.functional as F

from tests.golden.capture import capture

sdpa = F.scaled_dot_product_attention


def attend(x):
    """Causal attention of x [B, S, C] to itself, with two heads."""
    q = x.unflatten(-1, (2, -1)).transpose(1, 2)
    return sdpa(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


def laid_out(fn, mesh, *args, layout="zigzag", **options):
    """All passes over fn(x, *args), x [2, 32, 8] plain and full."""
    shard = {"x": 1, **options.pop("shard", {})}
    x = torch.randn(2, 32, 8)
    captured = capture(fn, x, *args, mesh=mesh, shard=shard, layout=layout, **options)
    assert captured.error is None, captured.error
    return captured


def moves(captured):
    """(relayouts that stay, those that are gone)."""
    return captured.ctx.findings.relayouts, captured.ctx.findings.relayouts_cancelled
