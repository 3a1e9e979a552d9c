"""Join what is written, part by part, into a new tensor.

    k = nope.new_empty(B, H, S, 192)
    k[..., :128] = nope; k[..., 128:] = rope            -> k = cat([nope, rope], 3)

    y = empty_like(x)
    y[..., 0::2] = a; y[..., 1::2] = b              -> y = stack([a, b], 4).flatten(3)

Where parts of one dimension cover all of it, nothing of the new tensor is left. The
join says what the writes hide from all passes after this one: where values come from.
Left alone: parts that overlap or leave entries, numbers, what is broadcast, a tensor
that is read in between, writes under no_grad.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.lengths import is_same, is_symbol
from cpcompile.torch_patches.tracing import plain_means_replicated
from cpcompile.torch_private import pytree
from cpcompile.torch_private.fake_tensors import enable_python_dispatcher

from ...graph.calls import NEW_TENSORS, spelled
from ...graph.context import Context
from ...graph.graph_pass import graph_pass
from ...graph.nodes import all_graphs, fake_mode_of, fake_value, insert_call


@graph_pass()
def join_parts(graph: fx.Graph, ctx: Context) -> int:
    """Rewrite new tensors that are written whole; return their number."""
    return sum(map(_join_all, all_graphs(graph)))


def _join_all(graph: fx.Graph) -> int:
    unrecorded = _under_no_grad(graph)
    order = {node: place for place, node in enumerate(graph.nodes)}
    count = 0
    for base in list(graph.nodes):
        value = fake_value(base)
        if spelled(base) not in NEW_TENSORS or not isinstance(value, Tensor):
            continue
        if not value.is_floating_point() or not value.is_contiguous():
            continue
        parts = _assigned(base, order)
        if parts is None or not unrecorded.isdisjoint(parts.calls):
            continue  # what is written under no_grad has no gradient
        if _cover(parts, value):
            _replace(parts, base)
            order = {node: place for place, node in enumerate(graph.nodes)}
            count += 1
    return count


def _under_no_grad(graph: fx.Graph) -> set[fx.Node]:
    """Return the calls of a graph under its own `torch.no_grad`."""
    records, found = True, set[fx.Node]()
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            records = node.args[0] is not False
        elif not records:
            found.add(node)
    return found


@dataclass
class _Parts:
    """What is written into a new tensor.

    dim: the dimension whose parts they are. calls: those that write, in order.
    """

    dim: int
    parts: list[tuple[range, fx.Node]] = field(default_factory=list)
    calls: list[fx.Node] = field(default_factory=list)

    def add(self, base: fx.Node, index: Any, source: Any) -> bool:
        """Note a write of `source` to base[index]; tell whether it is understood."""
        cut = _cut(index, fake_value(base))
        value = fake_value(source)
        if cut is None or not isinstance(value, Tensor):
            return False
        dim, entries = cut
        if self.parts and dim != self.dim:
            return False
        shape = list(fake_value(base).shape)
        shape[dim] = len(entries)
        if value.ndim != len(shape) or not all(map(is_same, value.shape, shape)):
            return False  # a number, or what is broadcast
        if value.device != fake_value(base).device:
            return False
        self.dim = dim
        self.parts.append((entries, source))
        return True


def _cut(index: Any, value: Tensor) -> tuple[int, range] | None:
    """Return the one dimension that an index cuts by a slice, and its entries."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(not isinstance(x, slice) and x is not Ellipsis for x in items):
        return None
    if Ellipsis in items:
        place = items.index(Ellipsis)
        missing = value.ndim + 1 - len(items)
        items[place : place + 1] = [slice(None)] * missing
    cut = [dim for dim, x in enumerate(items) if x != slice(None)]
    if len(cut) != 1 or Ellipsis in items:
        return None
    (dim,) = cut
    own = items[dim]
    limits = (own.start, own.stop, own.step)
    if is_symbol(value.shape[dim]) or not all(
        x is None or isinstance(x, int) for x in limits
    ):
        return None
    return dim, range(*own.indices(int(value.shape[dim])))


def _assigned(base: fx.Node, order: dict[fx.Node, int]) -> _Parts | None:
    """Read base[index] = source, again and again, before anything else reads base."""
    found = _Parts(0)
    writes = [x for x in base.users if spelled(x) == "setitem" and x.args[0] is base]
    for write in writes:
        _, index, source = write.args
        if source is base or write.users or not found.add(base, index, source):
            return None
    last = max(map(order.__getitem__, writes), default=-1)
    if any(order[x] < last for x in base.users if x not in writes):
        return None
    found.calls = writes
    return found if writes else None


def _cover(found: _Parts, value: Tensor) -> bool:
    """Tell whether the parts are all entries of the dimension, each once."""
    entries = sorted(n for part, _ in found.parts for n in part)
    if entries != list(range(int(value.shape[found.dim]))):
        return False
    steps = {part.step for part, _ in found.parts}
    return steps == {1} or steps == {len(found.parts)}


def _replace(found: _Parts, base: fx.Node) -> None:
    """Let readers read the joined parts, and erase the writes."""
    graph, dtype, after = base.graph, fake_value(base).dtype, found.calls[-1].next

    def call(target: Any, *args: Any) -> fx.Node:
        value = _value(graph, target, fx.map_arg(args, fake_value))
        with graph.inserting_before(after):
            return insert_call(graph, target, args, like=base, value=value)

    found.parts.sort(key=lambda x: x[0].start)
    parts = [
        x if fake_value(x).dtype == dtype else call(torch.Tensor.to, x, dtype)
        for _, x in found.parts
    ]
    if found.parts[0][0].step == 1:
        joined = call(torch.cat, parts, found.dim)
    else:
        stacked = call(torch.stack, parts, found.dim + 1)
        joined = call(torch.flatten, stacked, found.dim, found.dim + 1)
    base.replace_all_uses_with(
        joined, delete_user_cb=lambda user: user not in found.calls
    )
    for node in reversed(found.calls):
        graph.erase_node(node)
    if not base.users:
        graph.erase_node(base)


def _value(graph: fx.Graph, call: Callable[..., Any], args: Any) -> Any:
    """Make a call on fake values of a graph, whose own history does not matter."""
    with (
        fake_mode_of(graph),
        enable_python_dispatcher(),
        torch.enable_grad(),
        plain_means_replicated(),
    ):
        # Autograd refuses views that were made and written under no_grad.
        return call(*pytree.tree_map_only(Tensor, _leaf, args))


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad)
