"""Floating point operations of attention steps, for torch.utils.flop_counter.

Only pairs of a query and a key that it sees are counted, with two operations per
multiplication and addition. A pair costs the length of a row per matrix product: D for
q k' and for dq and dk, E for p v, for dv and for grad v'. The two backwards of a step
compute q k' and grad v' twice, and are counted so. Limits that are vectors and other
masks that are tensors are unknown here and count as none.

The operators that communicate have no formula: what has one counts as computation for
Inductor, whose scheduling of overlap runs it on one rank alone to time it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from cpcompile.geometry.visibility import Visible
from cpcompile.ops.step.attention_step_backward import Parts

_OF_PARTS: dict[Any, tuple[int, int]] = {
    Parts.DKDV.value: (2, 2),
    Parts.DQ.value: (2, 1),
}


def register() -> None:
    """Register the formulas; torch keeps them for the process."""
    ops = torch.ops.cp
    for op, head_dims, value_dims in (
        (ops.attention_step, 1, 1),
        (ops.attention_step_backward, 3, 2),
        (ops.local_attention, 1, 1),
        (ops.local_attention_backward, 3, 2),
    ):
        register_flop_formula(op)(_formula(op, head_dims, value_dims))


def _formula(op: Any, head_dims: int, value_dims: int) -> Callable[..., int]:
    """Make a formula of the arguments of `op`, with shapes in the place of tensors."""
    names = [x.name for x in op.default._schema.arguments]

    def formula(*args: Any, **kwargs: Any) -> int:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        q, k, v = (arguments[name] for name in ("q", "k", "v"))
        pairs = Visible.of_list(arguments.get("visible", ())).pairs(q[2], k[2])
        dims = _OF_PARTS.get(arguments.get("parts"), (head_dims, value_dims))
        return int(2 * q[0] * q[1] * pairs * (dims[0] * q[3] + dims[1] * v[3]))

    return formula
