"""A product for every token, where tokens are a dimension of a batch of products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cpcompile.ops.dtensor.local_part import dtensor_of, local_part
from cpcompile.ops.dtensor.shares import sharing_rows

Dims = tuple[int | None, int | None, int]
"""Where the tokens are in both operands and in the result; None: the same for all."""


def cp_token_products(
    equation: str | None, lhs: DTensor, rhs: DTensor, dims: Dims
) -> DTensor:
    """Compute matmul(lhs, rhs), or an einsum, on the tokens of this rank.

    torch flattens the dimensions of a batch, and DTensor has no placement for uneven
    parts of these, nor for parts of an inner one.

    Args:
        equation: of the einsum; None is matmul.
        lhs, rhs: one has its tokens in parts; the other in the same parts or in whole,
            or it is the same for all tokens.
        dims: the dimension of the tokens in lhs, rhs and the result.
    """
    *own, out = dims
    operands = [(x, dim) for x, dim in zip((lhs, rhs), own, strict=True)]
    source, at = next(
        (x, d) for x, d in operands if d is not None and Shard(d) in x.placements
    )
    split = [p == Shard(at) for p in source.placements]

    def placed(yes: Placement, no: Placement | None = None) -> list[Placement]:
        return [yes if s else no or Replicate() for s in split]

    left, right = (
        local_part(x, placed(Partial()))
        if dim is None
        else local_part(x.redistribute(placements=placed(Shard(dim))))
        for x, dim in operands
    )
    if equation is not None:
        local = torch.einsum(equation, left, right)
    elif dims[1] is None and dims[0] == lhs.ndim - 3 and rhs.ndim > 2:
        local = _more_rows(left, right)
    else:
        local = torch.matmul(left, right)
    shape = torch.Size((*local.shape[:out], source.shape[at], *local.shape[out + 1 :]))
    return dtensor_of(local.contiguous(), source.device_mesh, placed(Shard(out)), shape)


def cp_linear_of_parts(x: DTensor, weight: DTensor, bias: DTensor | None) -> DTensor:
    """Compute a linear layer of this rank's part of x, split along any but channels.

    weight, bias: the same on every rank; their gradients are sums over the ranks.
    """
    grads: list[Placement] = [
        p if p.is_replicate() else Partial() for p in x.placements
    ]
    own, own_weight = local_part(x), local_part(weight, grads)
    own_bias = None if bias is None else local_part(bias, grads)
    with sharing_rows(x.device_mesh, x.placements, x.numel(), own.numel()):
        local = F.linear(own, own_weight, own_bias)
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    return dtensor_of(local, x.device_mesh, x.placements, shape)


def _more_rows(x: Tensor, y: Tensor) -> Tensor:
    """Return matmul(x, y), of x [*, S, M, D] and y [*, 1, D, N], with S M rows.

    matmul would make S copies of y.
    """
    product = torch.matmul(x.flatten(-3, -2), y.squeeze(-3))
    result: Tensor = product.unflatten(-2, x.shape[-3:-1])
    return result
