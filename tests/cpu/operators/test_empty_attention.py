"""Attention of nothing: an empty batch, no tokens, no heads, or heads of no columns.

One device has a result and gradients for each; on several ranks they are equal.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cpcompile as cp
from tests.cpu.attention_cases import compiled_on, sequence_mesh
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import OPERAND_SCALE, check, deviation

# B, H, queries, keys, D
SHAPES = {
    "batch": (0, 2, 16, 16, 8),
    "tokens": (1, 2, 0, 0, 8),
    "queries": (1, 2, 0, 16, 8),
    "keys": (1, 2, 16, 0, 8),
    "heads": (1, 0, 16, 16, 8),
    "columns": (1, 2, 16, 16, 0),
}
KINDS = ("full", "causal", "window")


def attend(q: Tensor, k: Tensor, v: Tensor, kind: str) -> Tensor:
    if kind != "window":
        return F.scaled_dot_product_attention(q, k, v, is_causal=kind == "causal")
    row, key = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    mask = (row >= key) & (row < key + 5)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def differentiated(function, tensors: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves)
    found = torch.autograd.grad(out.sum(), leaves, allow_unused=True)
    # A device without keys has no graph to keys, an operator of ours gives zeros.
    grads = [
        torch.zeros_like(x) if g is None else g
        for x, g in zip(leaves, found, strict=True)
    ]
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in (out, *grads)]


@pytest.mark.parametrize("door", ["plain", "dtensor"])
@pytest.mark.parametrize("strategy", ["auto", "ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("shape", SHAPES)
@on_ranks(2)
def test_nothing_is_that_of_one_device(shape, strategy, door):
    B, H, R, K, D = SHAPES[shape]
    torch.manual_seed(0)
    tensors = [torch.randn(B, H, n, D) for n in (R, K, K)]
    given = tensors
    if door == "dtensor":
        given = [cp.shard(x, sequence_mesh(2), 2) for x in tensors]
    found = []
    for kind in KINDS:
        if kind == "causal" and R != K:
            continue
        torch._dynamo.reset()

        def alone(q, k, v, kind=kind):
            return attend(q, k, v, kind)

        compiled = compiled_on(2, alone, strategy=strategy)
        exact = differentiated(alone, [x.double() for x in tensors])
        values = differentiated(compiled, given), exact, differentiated(alone, tensors)
        names = [f"{kind}: {name}" for name in ("out", "dq", "dk", "dv")]
        for name, *each in zip(names, *values, strict=True):
            found.append(deviation(name, *each, floor=OPERAND_SCALE))
    check(found)
