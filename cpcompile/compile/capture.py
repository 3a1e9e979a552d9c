"""What AOTAutograd traces as one graph of the whole sequence, and what it takes apart.

It takes few calls apart: what has an exact rule in DTensor stays as it is, and what has
none is written in calls that have one. Local calls are decomposed as Inductor wants
them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cpcompile.errors import RewriteError
from cpcompile.passes.graph.context import Context, InputKind
from cpcompile.torch_private.operators import get_decompositions

aten = torch.ops.aten

# What the graph of the whole sequence does not have yet.
_INPUTS = (InputKind.KEPT, InputKind.OTHER_AXES, InputKind.LOCAL_PART)


def check_capture(ctx: Context) -> None:
    """Raise RewriteError for what the graph of the whole sequence lacks."""
    kinds = (x.kind for x in ctx.inputs.values())
    lacks = [f"inputs: {kind.value}" for kind in kinds if kind in _INPUTS]
    if lacks:
        raise RewriteError(
            f'cpcompile.config.graph is "joint", which lacks {lacks[0]}; needed '
            '"model", or one mesh axis and parameters that are whole'
        )


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of calls on the whole sequence."""
    table: dict[Any, Callable[..., Any]] = get_decompositions(
        [
            *(aten.nll_loss_forward, aten.nll_loss_backward),
            *(aten.nll_loss2d_forward, aten.nll_loss2d_backward),
            *(aten.mse_loss, aten.mse_loss_backward, aten.native_dropout_backward),
            *(aten.log_sigmoid_forward, aten.log_sigmoid_backward),
        ]
    )
    return table | {
        aten.mean.dim: _mean,
        aten.mean.default: _mean_of_all,
        aten.copy.default: _copy,
    }


def _mean(
    x: Tensor,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Divide a sum: means of shards that differ in size are not alike."""
    dims = list(dim) if dim else list(range(x.ndim))
    count = math.prod(x.shape[d] for d in dims) if x.ndim else 1
    total: Tensor = aten.sum.dim_IntList(x, dims, keepdim, dtype=dtype)
    return total / count


def _mean_of_all(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return _mean(x, dtype=dtype)


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Return what x is after it was written to."""
    return source.to(x).expand(x.shape).clone()
