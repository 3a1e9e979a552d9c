"""Floating point operations of the cp:: operators, for torch.utils.flop_counter.

Only pairs of a query and a key that it sees are counted, with two operations per
multiplication and addition. A pair costs the length of a row per matrix product: D for
q k' and for dq and dk, E for p v, for dv and for grad v'. The two backwards of a step
compute q k' and grad v' twice, and are counted so. Limits that are vectors are unknown
here and count as none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from cpcompile.layout import Chunks
from cpcompile.ops.communication import group_by_name
from cpcompile.visibility import Visible, visible_chunk

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
    for name in ("ring", "all_gather"):
        register_flop_formula(getattr(ops, f"{name}_attention"))(_of_forward)
        register_flop_formula(getattr(ops, f"{name}_attention_backward"))(_of_backward)


def _of_step(q: int, rows: int, head_dims: int, value_dims: int) -> Callable[..., int]:
    """A formula for shapes in place of tensors; `q` and `rows` say where these are."""

    def formula(*args: Any, **kwargs: Any) -> int:
        visible = Visible.of_lists(*args[rows : rows + 4])
        qkv = args[q], args[q + 1], args[q + 2]
        return _operations(*qkv, visible, head_dims, value_dims)

    return formula


def _of_forward(q: Shape, k: Shape, v: Shape, *rest: Any, **kwargs: Any) -> int:
    return _operations(q, k, v, _visible_to_rank(*rest), 1, 1, rest[1])


def _of_backward(
    grad: Shape,
    q: Shape,
    k: Shape,
    v: Shape,
    out: Shape,
    lse: Shape,
    *rest: Any,
    **_: Any,
) -> int:
    return _operations(q, k, v, _visible_to_rank(*rest), 3, 2, rest[1])


def _visible_to_rank(
    q_len: int, kv_len: int, is_causal: bool, scale: float, group: str
) -> Visible:
    """What the local queries see of the whole sequence of keys."""
    pg = group_by_name(group)
    queries = Chunks(q_len, pg.size())
    start, count = queries.start(pg.rank()), queries.count(pg.rank())
    return visible_chunk(start, count, 0, kv_len, kv_len, is_causal)


def _operations(
    q: Shape,
    k: Shape,
    v: Shape,
    visible: Visible,
    head_dims: int,
    value_dims: int,
    keys: int | None = None,
) -> int:
    pairs = visible.pairs(q[2], k[2] if keys is None else keys)
    return 2 * q[0] * q[1] * pairs * (head_dims * q[3] + value_dims * v[3])
