"""Find where blocks begin: where the least is lost.

A border keeps Inductor from fusing a call after it with one before it. Between a matrix
product and its operands there is nothing to fuse. What a function returns must be
memory of its own: Inductor frees and overwrites the results and the operands of a call
as if none of them shared any.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.lengths import expected
from cpcompile.torch_private.operators import OpOverload

from .repeats import RepeatedRun
from .signatures import is_message, is_waited_for

aten = torch.ops.aten

# Inductor calls a library or a template for them, with any overload.
_OPAQUE = (
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addbmm, aten.mv, aten.addmv,
    aten._int_mm, aten._scaled_mm, aten._grouped_mm, aten._scaled_grouped_mm,
    aten._addmm_activation,
    aten.convolution, aten.convolution_backward,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_cudnn_attention_backward,
    aten._fft_r2c, aten._fft_c2r, aten._fft_c2c,
    aten.sort, aten.topk, aten.kthvalue,
    aten.linalg_qr, aten.linalg_cholesky_ex, aten.linalg_lu_factor_ex,
    aten.linalg_inv_ex, aten.linalg_solve_triangular, aten.linalg_matrix_exp,
    aten._linalg_svd, aten._linalg_eigh, aten._linalg_det, aten._linalg_solve_ex,
)  # fmt: skip


def best_offset(calls: Sequence[fx.Node], repeat: RepeatedRun) -> int:
    """Return by how many calls the first block is to begin after the repeat does."""
    levels = _levels(calls)
    place = {node: i for i, node in enumerate(calls)}

    def cost(offset: int) -> tuple[bool, int, int]:
        border = repeat.start + offset + repeat.period
        crossing = [
            node
            for node in calls[border - 2 * repeat.period : border]
            if any(place.get(x, -1) >= border for x in node.users)
        ]
        lost = [
            x
            for x in crossing
            if any(_fuses(x, u, place, border, levels) for u in x.users)
        ]
        split = any(not _is_whole(x) for x in crossing)
        return split, sum(map(bytes_of, lost)), sum(map(bytes_of, crossing))

    return min(range(repeat.slack + 1), key=lambda offset: (cost(offset), offset))


def _fuses(
    node: fx.Node,
    user: fx.Node,
    place: dict[fx.Node, int],
    border: int,
    levels: dict[fx.Node, int],
) -> bool:
    """Tell whether a call after a border could share a kernel with `node` or a view.

    The view is one of `node`.
    """
    if place.get(user, -1) < border or levels[user] != levels[node]:
        return False
    if source(user) is not None:
        return any(_fuses(node, x, place, border, levels) for x in user.users)
    return not is_opaque(user)


def _levels(calls: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Count the most opaque calls on a way to each call; no kernel spans them."""
    levels: dict[fx.Node, int] = {}
    for node in calls:
        before = (levels.get(x, 0) + is_opaque(x) for x in node.all_input_nodes)
        levels[node] = max(before, default=0)
    return levels


def is_opaque(node: fx.Node) -> bool:
    """Tell whether Inductor writes no kernel that a call could be fused into."""
    target = node.target
    if not isinstance(target, OpOverload) or source(node) is not None:
        return False
    if is_message(node) or target.namespace == "cp":
        return True
    return any(target.overloadpacket is packet for packet in _OPAQUE)


def _is_whole(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor) and is_waited_for(node)


def bytes_of(node: fx.Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return 0
    return math.prod(map(expected, value.shape)) * value.element_size()


# Views whose schema says that they copy.
_VIEWS = (
    aten._unsafe_view.default,
    torch.ops.prims.inductor_force_stride_order.default
    if hasattr(torch.ops.prims, "inductor_force_stride_order")
    else aten._unsafe_view.default,
)
# Copies, unless there is nothing to change.
_CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)


def source(node: fx.Node) -> fx.Node | None:
    """Return the operand in whose memory the result of `node` may lie, or None."""
    target = node.target
    if target is operator.getitem:
        tuple_node = node.args[0]
        assert isinstance(tuple_node, fx.Node), f"{node} is no part of a result"
        return tuple_node if source(tuple_node) is not None else None
    if not isinstance(target, OpOverload):
        return None
    operands = node.all_input_nodes
    if not operands:
        return None
    if target in _VIEWS or (target in _CASTS and _same(node, operands[0])):
        return operands[0]
    if any(x.alias_info is not None for x in target._schema.returns):
        return operands[0]
    return None


def _same(node: fx.Node, operand: fx.Node) -> bool:
    new, old = node.meta["val"], operand.meta["val"]
    if not (isinstance(new, Tensor) and isinstance(old, Tensor)):
        return False
    return (new.dtype, new.device) == (old.dtype, old.device)
