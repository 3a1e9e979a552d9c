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

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from cpcompile.geometry.visibility import Visible

Shape = Sequence[int]


def register() -> None:
    """Register the formulas; torch keeps them for the process."""
    ops = torch.ops.cp
    for op, q, rows, head_dims, value_dims in (
        (ops.attention_step, 0, 7, 1, 1),
        (ops.attention_step_dkdv, 1, 10, 2, 2),
        (ops.attention_step_dq, 1, 9, 2, 1),
        (ops.attention_step_backward, 1, 7, 3, 2),
    ):
        register_flop_formula(op)(_of_step(q, rows, head_dims, value_dims))
    register_flop_formula(ops.local_attention)(_of_all_pairs(0, 1, 1))
    register_flop_formula(ops.local_attention_backward)(_of_all_pairs(1, 3, 2))


def _of_step(q: int, rows: int, head_dims: int, value_dims: int) -> Callable[..., int]:
    """Make a formula of shapes, not of tensors; `q` and `rows` say where these are."""

    def formula(*args: Any, **kwargs: Any) -> int:
        visible = Visible.of_lists(*args[rows : rows + 4])
        qkv = args[q], args[q + 1], args[q + 2]
        return _operations(*qkv, visible, head_dims, value_dims)

    return formula


def _of_all_pairs(q: int, head_dims: int, value_dims: int) -> Callable[..., int]:
    """Make a formula of whole sequences; `q` says where q's shape is, then k and v."""

    def formula(*args: Any, **kwargs: Any) -> int:
        qkv = args[q], args[q + 1], args[q + 2]
        return _operations(*qkv, Visible(), head_dims, value_dims)

    return formula


def _operations(
    q: Shape,
    k: Shape,
    v: Shape,
    visible: Visible,
    head_dims: int,
    value_dims: int,
) -> int:
    pairs = visible.pairs(q[2], k[2])
    return 2 * q[0] * q[1] * pairs * (head_dims * q[3] + value_dims * v[3])
