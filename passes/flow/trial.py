"""What may be wrong with a call that DTensor has done on fake tensors.

Whether DTensor has a sharding rule is found out by asking it, with the very arguments
of the call. Some of its answers are not those of one device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

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
