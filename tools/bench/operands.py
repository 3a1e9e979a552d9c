"""The operands of attention that the ranks of a benchmark share, and exact results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

BATCH, HEADS, HEAD_DIM = 1, 8, 64
CHECK_TOKENS = 256
SHAPE = f"B={BATCH}, H={HEADS}, D={HEAD_DIM}, float32, causal"


def make_whole(tokens: int) -> list[Tensor]:
    """q, k, v and the gradient of out, equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, HEADS, tokens, HEAD_DIM)
    return [torch.randn(shape, generator=generator) for _ in range(4)]


def exact(whole: Sequence[Tensor]) -> list[Tensor]:
    """out and the gradients of q, k and v of `make_whole`, in float64."""
    q, k, v, grad = (x.double().requires_grad_() for x in whole)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def assert_close(
    name: str, found: Sequence[Tensor], expected: Sequence[Tensor]
) -> None:
    """Assert that `name` computed what `exact` has."""
    for x, reference in zip(found, expected, strict=True):
        error = (x.detach() - reference).abs().max() / reference.abs().max()
        assert error < 1e-5, f"{name}: relative error {error:.2g}"
