"""Tell which calls of a joint graph are not computed again, and name what is saved."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

import cpcompile.ops.tile_sums  # noqa: F401  # registers its operators
from cpcompile.geometry.lengths import expected
from cpcompile.ops.comm.communicating import communicates
from cpcompile.torch_private.operators import HigherOrderOperator

aten = torch.ops.aten
# Attention over whole sequences, which Ulysses leaves to aten.
_ATEN_ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)


def is_attention(node: fx.Node) -> bool:
    """Tell whether a call is attention, or sends what attention needs or made."""
    target = node.target
    if target in _ATEN_ATTENTION:
        return not _argument(node, "dropout_p")
    ours = isinstance(target, torch._ops.OpOverload) and target.namespace == "cp"
    return (ours and not _is_of_tiles(target)) or communicates(target)


def _is_of_tiles(target: Any) -> bool:
    return target is torch.ops.cp.after.default


def is_to_keep(node: fx.Node) -> bool:
    """Tell whether a call is kept where a budget has other calls computed again.

    These are attention, which only a budget that cannot be met otherwise computes
    again; messages, which other ranks would have to send again; random numbers, which
    would be others; and tiles, whose time nothing estimates.
    """
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:
        return True
    if is_attention(node) or _is_of_tiles(target):
        return True
    return target.namespace == "_c10d_functional"


def _argument(node: fx.Node, name: str) -> Any:
    target: Any = node.target
    names = [x.name for x in target._schema.arguments]
    place = names.index(name)
    if place < len(node.args):
        return node.args[place]
    return node.kwargs.get(name, target._schema.arguments[place].default_value)


def saved_bytes(graph: fx.Graph, saved: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """Return the bytes that each saved value keeps alive; program inputs take none.

    A view keeps all of its memory alive, which counts once.
    """
    inputs = graph.find_nodes(op="placeholder")
    counted = {m[0] for x in inputs if (m := _memory(x)) is not None}
    sizes = {}
    for node in saved:
        memory = _memory(node)
        if memory is not None and memory[0] not in counted:
            counted.add(memory[0])
            sizes[node] = memory[1]
    return sizes


def _memory(node: fx.Node) -> tuple[int, int] | None:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    storage = value.untyped_storage()
    return storage._cdata, int(expected(storage.nbytes()))


def maker(node: fx.Node) -> fx.Node:
    """Return the call that a saved value comes from by way of items and views."""
    while node.op == "call_function":
        target = node.target
        is_view = isinstance(target, torch._ops.OpOverload) and target.is_view
        if target is not operator.getitem and not is_view:
            break
        node = node.all_input_nodes[0]
    return node


def kind(node: fx.Node) -> str:
    """Name the kind of a saved value, in the words of a break-down."""
    call = maker(node)
    if is_attention(call):
        return "attention and its messages"
    if isinstance(call.target, HigherOrderOperator) or _is_of_tiles(call.target):
        return "results of tiles, and gradients that a loss computes in the forward"
    if is_to_keep(call):
        return "results of collectives, and random numbers"
    return "other values"


def break_down(sizes: dict[fx.Node, int]) -> str:
    """Describe saved sizes by kind.

    For example "12.0 MiB of attention and its messages, 3.1 MiB of other values".
    """
    total: Counter[str] = Counter()
    for node, size in sizes.items():
        total[kind(node)] += size
    return ", ".join(f"{n / 2**20:.1f} MiB of {k}" for k, n in total.most_common())
