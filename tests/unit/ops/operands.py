"""Small operands of the attention operators."""

import torch
from torch.distributed.tensor import DTensor, Shard

from cpcompile.geometry.layout import Chunks


def make_operands(dtype, kv_heads, q_len=6, kv_len=6, dims=(8, 8)):
    """q [2, 4, q_len, D], k [2, kv_heads, kv_len, D] and v [2, kv_heads, kv_len, E]."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, q_len, dims[0], dtype=dtype)
    k = torch.randn(2, kv_heads, kv_len, dims[0], dtype=dtype)
    v = torch.randn(2, kv_heads, kv_len, dims[1], dtype=dtype)
    return q, k, v


def zeros_on(mesh, shape, placements, dtype=torch.float32):
    """A DTensor of zeros of this global shape, whose ranks may have uneven parts."""
    local = list(shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            chunks = Chunks(local[placement.dim], mesh.size(axis))
            local[placement.dim] = chunks.count(mesh.get_local_rank(axis))
    return DTensor.from_local(
        torch.zeros(local, dtype=dtype),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
