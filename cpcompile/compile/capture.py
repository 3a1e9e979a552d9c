"""What AOTAutograd traces as one graph of the whole sequence, and what it takes apart.

It takes few calls apart: what has an exact rule in DTensor stays as it is, and what has
none is written in calls that have one. Local calls are decomposed as Inductor wants
them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.passes.graph.context import Context
from cpcompile.passes.graph.nodes import memory_order
from cpcompile.passes.whole.ask_policies import ask_policies
from cpcompile.passes.whole.edges import Edges
from cpcompile.passes.whole.other_axes import enter_other_axes, moves_are_calls
from cpcompile.passes.whole.parameter_calls import settle_gradients
from cpcompile.passes.whole.sequence_mesh import drop_mesh_changes
from cpcompile.torch_private.dynamo import functorch_config
from cpcompile.torch_private.operators import get_decompositions

aten = torch.ops.aten


def captured(graph: fx.Graph, ctx: Context) -> None:
    """Prepare Dynamo's graph, as the passes left it, for the trace.

    All ranks call this.

    Raises: RankMismatchError; RewriteError for a rank's part of a tensor.
    """
    # They decide how often `localise` has the ranks meet.
    ctx.compare(ctx.plan_texts())
    ask_policies(graph)
    drop_mesh_changes(graph, ctx)
    settle_gradients(graph, ctx)
    enter_other_axes(graph, ctx)


@contextmanager
def traces_whole(edges: Edges | None) -> Iterator[None]:
    """Have AOTAutograd trace a graph of the whole sequence; None: another graph."""
    if edges is None:
        yield
        return
    # The gradient of a shard is a shard.
    settings = functorch_config.patch(guess_tangent_strides_as_outputs=False)
    with settings, moves_are_calls(edges.ctx.mesh):
        yield


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of calls on the whole sequence."""
    table: dict[Any, Callable[..., Any]] = get_decompositions(
        [
            *(aten.nll_loss_forward, aten.nll_loss_backward),
            *(aten.nll_loss2d_forward, aten.nll_loss2d_backward),
            *(aten.mse_loss, aten.mse_loss_backward, aten.native_dropout_backward),
            *(aten.log_sigmoid_forward, aten.log_sigmoid_backward),
            # DTensor takes means of unequal parts for the mean.
            *(aten.smooth_l1_loss, aten.smooth_l1_loss_backward),
            *(aten.huber_loss, aten.huber_loss_backward),
            *(aten.binary_cross_entropy, aten.binary_cross_entropy_backward),
            *(aten.soft_margin_loss, aten.soft_margin_loss_backward),
            aten.binary_cross_entropy_with_logits,
        ]
    )
    return table | {
        aten.mean.dim: _mean,
        aten.mean.default: _mean_of_all,
        aten.copy.default: _copy,
        aten.fill.Tensor: _copy,
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
    """Return what x is after it was written to: its memory keeps its order."""
    order = memory_order(x) or tuple(range(x.ndim))
    whole = source.to(x).expand(x.shape).permute(order)
    back = sorted(range(x.ndim), key=order.__getitem__)
    return whole.clone(memory_format=torch.contiguous_format).permute(back)
