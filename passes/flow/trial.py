"""What may be wrong with a call that DTensor has done on fake tensors.

Whether DTensor has a sharding rule is found out by asking it, with the very arguments
of the call. Some of its answers are not those of one device.

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

from cpcompile.geometry.lengths import is_symbol
from cpcompile.torch_private import pytree
from cpcompile.torch_private.distributed import compute_local_shape_and_global_offset
from cpcompile.torch_private.fake_tensors import (
    TorchDispatchMode,
    disable_current_modes,
)
from cpcompile.torch_private.operators import OpOverload

DRAWS_NUMBERS = "every rank would draw the same random numbers for its own part"


class RandomNumbers(TorchDispatchMode):
    """A mode that sees whether a call draws random numbers, on DTensors."""

    supports_higher_order_operators = True  # which see no DTensors: see cp_scan
    drawn = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if draws_numbers(func, args, kwargs or {}):
            leaves = pytree.tree_leaves((args, kwargs))
            self.drawn |= any(isinstance(x, DTensor) for x in leaves)
        return func(*args, **(kwargs or {}))


def draws_numbers(func: Any, args: Any, kwargs: Any) -> bool:
    """Tell whether a call draws random numbers; attention does only for its dropout."""
    if not isinstance(func, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            dropout_p = (
                args[position] if position < len(args) else argument.default_value
            )
            return bool(kwargs.get("dropout_p", dropout_p) != 0.0)
    return True


def untrue(result: Any) -> str | None:
    """Say which result DTensor's rules get wrong; None if they get all right.

    An average of averages is not the average: parts may count differently much. The
    rule of convolutions takes some calls for local that are not, and parts are too
    small.
    """
    for x in pytree.tree_leaves(result):
        if isinstance(x, DTensor):
            local = x._local_tensor.shape
            if isinstance(x._local_tensor, DTensor):
                return "a tensor of a class of its own is computed below DTensor"
            if not any(map(is_symbol, (*x.shape, *local))):
                with disable_current_modes():  # it computes with small tensors
                    expected_shape, _ = compute_local_shape_and_global_offset(
                        x.shape, x.device_mesh, x.placements
                    )
                if tuple(local) != tuple(expected_shape):
                    return f"it gives a part {list(local)} of {list(x.shape)}"
            for placement in x.placements:
                if placement.is_partial() and placement.reduce_op == "avg":  # type: ignore[attr-defined]
                    return "it would average the averages of the ranks"
    return None


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
