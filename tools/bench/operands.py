"""The operands of attention that the ranks of a benchmark share, and exact results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

BATCH, HEADS, HEAD_DIM = 1, 8, 64
CHECK_TOKENS = 256
SIZES = f"B={BATCH}, H={HEADS}, D={HEAD_DIM}"
SHAPE = f"{SIZES}, float32, causal"


def make_whole(tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Make q, k, v and the gradient of out, equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, HEADS, tokens, HEAD_DIM)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(4)]


def exact(whole: Sequence[Tensor], visible: Tensor | None = None) -> list[Tensor]:
    """Compute out and the gradients of q, k and v of `make_whole`, in float64.

    visible: bool [tokens, tokens], which keys (columns) a query sees; None: causal.
    """
    q, k, v, grad = (x.double().requires_grad_() for x in whole)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=visible is None
    )
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest error of any tensor, relative to its largest number."""
    return max(
        float((x.detach() - reference).abs().max() / reference.abs().max())
        for x, reference in zip(found, expected, strict=True)
    )


def assert_close(
    name: str, found: Sequence[Tensor], expected: Sequence[Tensor]
) -> None:
    """Assert that `name` computed in float32 what `exact` has."""
    error = relative_error(found, expected)
    assert error < 1e-5, f"{name}: relative error {error:.2g}"
