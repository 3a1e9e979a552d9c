"""Make writes through views functional, so that every reader is seen in the graph.

    y = relu(x); first = y[:, :4]; first.add_(1); z = y * 2
      ->
    y = relu(x); first = y[:, :4]; clone = first.clone(); clone.add_(1)
    written = cp_write(y, clone, getitem); z = written * 2

A write that only its own tensor sees stays: AOTAutograd makes it functional. Where
another name of the memory is read later, the write goes to a copy, the tensor that owns
the memory is made anew with the copy in its place, and later readers of its views read
the same views of the new one. Memory of arguments stays as it is: the caller sees what
is written there. Passes follow the tokens of floating-point numbers alone, so that
writes to others need not be seen. Results of `out=` are copied there (copy_into_out).
Never raises: AOTAutograd makes functional what is left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.torch_patches.tracing import plain_means_replicated
from cpcompile.torch_private import pytree
from cpcompile.torch_private.fake_tensors import enable_python_dispatcher

from ...graph.calls import function_of, spelled
from ...graph.context import Context
from ...graph.effects import is_in_place, view_of, written_by
from ...graph.graph_pass import graph_pass
from ...graph.nodes import (
    all_graphs,
    expected_shape,
    fake_mode_of,
    fake_value,
    insert_call,
    storage,
)
from ...placement.edge_gradients import as_if_written
from .copy_into_out import copy_into_out
from .local_writes import ViewStep, written

log = logging.getLogger(__name__)


@graph_pass()
def functionalise_writes(graph: fx.Graph, ctx: Context) -> int:
    """Make the writes of a graph functional, also in checkpoint regions.

    Returns: the number of rewritten writes.
    """
    rewritten = 0
    for subgraph in all_graphs(graph):
        rewritten += copy_into_out(subgraph, value_of_call)
        rewritten += _Writes(subgraph).rewrite()
    return rewritten


def cp_write(whole: Tensor, part: Tensor, *steps: ViewStep) -> Tensor:
    """Return `whole` with `part` where these views lead."""
    return as_if_written(whole, written(whole, part, steps))


@dataclass(frozen=True)
class _Name:
    """A node that names some memory: `views` lead to it from the node that owns it.

    views is None where the node may be a copy as well.
    """

    node: fx.Node
    owner: fx.Node
    views: tuple[fx.Node, ...] | None


class _Writes:
    """The writes of one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        inputs = map(fake_value, graph.find_nodes(op="placeholder"))
        self.distributed = any(isinstance(x, DTensor) for x in inputs)
        self.names: dict[fx.Node, _Name] = {}
        # By owner: the name that was last written to, for all of the memory.
        self.newest: dict[fx.Node, fx.Node] = {}
        self.renewed: set[fx.Node] = set()  # whose values lie in other memory by now
        calls = [x for x in graph.nodes if x.op in ("call_function", "call_method")]
        self.writes = {x for x in calls if is_in_place(x)}
        self.views = {x for x in calls if x not in self.writes and self._is_view(x)}
        other_calls = [x for x in calls if x not in self.writes | self.views]
        # Only the strides of the whole tensor would tell, which DTensor hides.
        self.unclear = {x for x in other_calls if self.distributed and view_of(x)}

    def rewrite(self) -> int:
        """Rewrite the writes that other names see; return their number."""
        rewritten = 0
        for node in list(self.graph.nodes):
            self.names[node] = self._name(node)
            if self.names[node].owner is not node and node.args[0] in self.renewed:
                self._refresh(node)
            if node in self.writes:
                rewritten += self._visit(node)
        return rewritten

    def _refresh(self, node: fx.Node) -> None:
        """Update the value of a view, or of a write, of memory that was made anew."""
        self.renewed.add(node)
        if node in self.writes:
            if isinstance(fake_value(node), Tensor):
                node.meta["example_value"] = fake_value(node.args[0])
            return
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), fake_value)
        node.meta["example_value"] = self._value(function_of(node), args, kwargs)

    def _name(self, node: fx.Node) -> _Name:
        """Return what memory a node names; its own, if it is no view."""
        source = node.args[0] if node.args else None
        is_clear = node in self.writes or node in self.views
        if not isinstance(source, fx.Node) or not (is_clear or node in self.unclear):
            return _Name(node, node, ())
        name = self.names[source]
        if name.views is None or not is_clear:
            return _Name(node, name.owner, None)
        views = (node,) if node in self.views else ()
        return _Name(node, name.owner, (*name.views, *views))

    def _is_view(self, node: fx.Node) -> bool:
        """Tell whether a call gives a view of its first argument, its only tensor."""
        inputs = node.all_input_nodes
        if len(inputs) != 1 or inputs[0] not in node.args[:1]:
            return False
        (source,) = inputs
        value, before = fake_value(node), fake_value(source)
        if isinstance(before, tuple | list):
            return spelled(node) == "getitem" and self._is_view(source)
        if self.distributed or isinstance(value, tuple | list):
            is_view = view_of(node) is source and isinstance(before, Tensor)
            return is_view and self._is_always_view(node)
        return storage(node) is not None and storage(node) == storage(source)

    def _is_always_view(self, node: fx.Node) -> bool:
        """Tell whether a call gives a view whatever the strides are.

        Memory does not tell this on DTensors, whose parts may be cut anew. A tensor of
        which no two dimensions can be joined does.
        """
        source = fake_value(node.args[0])
        sizes, strides = expected_shape(source), [2]
        for size in reversed(sizes):
            strides.insert(0, strides[0] * (size + 1))
        layout = {"dtype": source.dtype, "device": source.device}
        apart = self._value(torch.empty_strided, (sizes, strides[1:]), layout)
        try:
            view = self._value(function_of(node), (apart, *node.args[1:]), node.kwargs)
        except (RuntimeError, ValueError):
            return True  # as Tensor.view, which does not copy
        first = pytree.tree_leaves(view)[0]
        return bool(first.untyped_storage()._cdata == apart.untyped_storage()._cdata)

    def _visit(self, write: fx.Node) -> bool:
        base = write.args[0] if write.args else None
        if not isinstance(base, fx.Node) or written_by(write) != [base]:
            return False
        value, name = fake_value(base), self.names[base]
        floating = isinstance(value, Tensor) and value.is_floating_point()
        if not floating or name.owner.op in ("placeholder", "get_attr"):
            return False
        if name.views is None:
            return False
        if not name.views:
            self.newest[name.owner] = base
        order = {node: index for index, node in enumerate(self.graph.nodes)}
        later: dict[fx.Node, list[fx.Node]] = {}
        for alias in self.names.values():
            if alias.owner is name.owner and alias.node not in (base, write):
                users = [x for x in alias.node.users if order[x] > order[write]]
                if users and isinstance(fake_value(alias.node), Tensor):
                    later[alias.node] = users
        if not later or any(self.names[x].views is None for x in later):
            return False
        log.debug("%s: others read what it writes: %s", write.name, list(later))
        views = {other: self.names[other].views for other in later}
        whole, last = base, write
        if name.views:
            for other in (base, write):
                views[other] = name.views
                later[other] = [x for x in other.users if order[x] > order[write]]
            newest = self.newest.get(name.owner, name.owner)
            copy = self._insert_before(write, base)
            write.replace_input_with(base, copy)
            whole = last = self._insert_written(write, newest, copy, name.views)
        for other, users in later.items():
            again = whole
            for view in (users and views[other]) or ():
                again = last = self._again(view, again, last)
            _read_instead(users, other, again)
        return True

    def _insert_before(self, write: fx.Node, base: fx.Node) -> fx.Node:
        with self.graph.inserting_before(write):
            value = self._value(torch.clone, (fake_value(base),))
            copy = insert_call(
                self.graph, torch.clone, (base,), like=write, value=value
            )
        self.names[copy] = self.names[write] = _Name(copy, copy, ())
        self.renewed.add(copy)
        return copy

    def _insert_written(
        self, write: fx.Node, whole: fx.Node, part: fx.Node, views: tuple[fx.Node, ...]
    ) -> fx.Node:
        value = self._value(torch.clone, (fake_value(whole),))
        written = fake_value(write)
        parts = [x for x in (written, fake_value(part)) if isinstance(x, Tensor)]
        if any(x.requires_grad for x in parts) and not value.requires_grad:
            value = value.detach().requires_grad_()
        with self.graph.inserting_after(write):
            args = (whole, part, *map(ViewStep.of, views))
            node = insert_call(self.graph, cp_write, args, like=write, value=value)
        self.names[node] = _Name(node, node, ())
        self.renewed.add(node)
        return node

    def _again(self, view: fx.Node, source: fx.Node, after: fx.Node) -> fx.Node:
        """Make the same view of another tensor."""
        with self.graph.inserting_after(after):
            new = self.graph.node_copy(view, lambda _: source)
        new.meta = dict(view.meta)
        self.views.add(new)
        self.names[new] = self._name(new)
        self._refresh(new)
        return new

    def _value(
        self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any] | None = None
    ) -> Any:
        return value_of_call(self.graph, call, args, kwargs)


def value_of_call(
    graph: fx.Graph,
    call: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Make a call on fake values of a graph, whose own history does not matter."""
    with (
        fake_mode_of(graph),
        enable_python_dispatcher(),
        torch.enable_grad(),
        plain_means_replicated(),
    ):
        # Autograd refuses views that were made and written under no_grad.
        args, kwargs = pytree.tree_map_only(Tensor, _leaf, (args, kwargs or {}))
        return call(*args, **kwargs)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad)


def _read_instead(users: list[fx.Node], old: fx.Node, new: fx.Node) -> None:
    for user in users:
        user.replace_input_with(old, new)
