"""Detect calls that DTensor shards, and would do wrong.

Note [Sums that wait]
A reduction over a sharded dimension gives every rank a part, and DTensor combines the
parts when a call needs it. Sums may wait, and so may maxima, minima and averages. But
(torch 2.13) the parts of a norm and of torch.any count as sums too: x.norm(dim=1).sum()
would add up norms of parts, and mask.any(1).float() count ranks. These, and products,
are combined at once; a call that adds them up inside is not left to DTensor.

Note [Images without a batch]
The backward of adaptive_avg_pool2d may be split on channels. Its rule (torch 2.13)
takes dimension 1 for the channels, which is rows where there is no batch. The rule of
convolutions takes a part of a weight for all of it, and a summand for the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial

from cpcompile.torch_private import pytree
from cpcompile.torch_private.fake_tensors import TorchDispatchMode

aten = torch.ops.aten


def must_not_wait(x: Any) -> bool:
    """Tell whether x has parts that DTensor takes for what they are not."""
    return isinstance(x, DTensor) and any(
        p.is_partial() and (p not in _MAY_WAIT or x.dtype == torch.bool)
        for p in x.placements
    )


_MAY_WAIT = tuple(Partial(kind) for kind in ("sum", "avg", "max", "min"))


class MisreadRules(TorchDispatchMode):
    """A mode that sees whether DTensor would do a call wrong; `problem` says why."""

    supports_higher_order_operators = True
    problem: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        dtensors = _distributed((args, kwargs))
        if dtensors and self.problem is None:
            waits = any(
                p.is_partial() for x in _distributed(result) for p in x.placements
            )
            if waits and any(map(must_not_wait, dtensors)) and not _keeps_parts(func):
                self.problem = "it would add up what is no sum over the ranks"
            elif any(map(_is_split, dtensors)) and _is_image_without_batch(func, args):
                self.problem = (
                    "DTensor takes rows of an image without a batch for channels"
                )
            elif func in _FILLS and _is_summand(args[0]):
                self.problem = "DTensor fills the summand of every rank"
            elif func is aten.convolution.default and _is_split(args[1]):
                self.problem = "DTensor takes a part of the weight for all of it"
            elif func is aten.convolution.default and any(map(_is_summand, args[:3])):
                self.problem = "DTensor takes a summand of a rank for the sum"
        return result


_FILLS = (aten.fill_.Scalar, aten.fill_.Tensor)  # as of empty_like, in 1 - x


def _distributed(values: Any) -> list[DTensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, DTensor)]


def _keeps_parts(func: Any) -> bool:
    """Tell whether a call gives its numbers as they are; in place, DTensor refuses."""
    returns = func._schema.returns
    return func is aten.clone.default or any(r.alias_info for r in returns)


def _is_summand(x: Any) -> bool:
    return isinstance(x, DTensor) and any(p.is_partial() for p in x.placements)


def _is_split(x: Any) -> bool:
    return isinstance(x, DTensor) and any(
        not (p.is_replicate() or p.is_partial()) for p in x.placements
    )


def _is_image_without_batch(func: Any, args: Any) -> bool:
    is_backward = func is aten._adaptive_avg_pool2d_backward.default
    return is_backward and args[1].ndim == _CHANNELS_FIRST


_CHANNELS_FIRST = 3  # [C, H, W]
