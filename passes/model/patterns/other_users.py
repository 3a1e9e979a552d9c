"""Find who reads a value of a graph, in addition to the one reader that matters."""

from __future__ import annotations

import torch
import torch.fx as fx

from ...graph.calls import canonical_call, spelled
from ...graph.effects import is_in_place, written_by
from ...graph.nodes import all_nodes, fake_value


def shifts_of(node: fx.Node, reader: fx.Node) -> tuple[fx.Node, ...]:
    """Return the calls that compute the maximum which a call subtracts, if any.

    That is x.max(-1, keepdim=True).values in x - that.
    """
    for user in node.users:
        if spelled(user) == "amax" and {*user.users} == {reader}:
            return (user,)
        if spelled(user) == "max" and len(user.users) == 1:
            (values,) = user.users
            if values.args[1:] in ((0,), ("values",)) and {*values.users} == {reader}:
                return user, values
    return ()


def writes_before(
    node: fx.Node, readers: set[fx.Node], reader: fx.Node
) -> list[fx.Node] | None:
    """Return the statements that write to a value before it is read, in order.

    None if anything else reads it, or a write comes after its reader.
    """
    writes = [x for x in node.users if _is_statement(x) and written_by(x) == [node]]
    users = {x for x in node.users if not _reads_nothing(x, node)}
    if users != {*writes, *readers}:
        return None
    earlier_writes, at = [], node
    while at is not reader and at.op != "output":
        at = at.next
        if at in writes:
            earlier_writes.append(at)
    return earlier_writes if len(earlier_writes) == len(writes) else None


def release_scores(graph: fx.Graph) -> None:
    """Rewrite calls that read no element of a tensor, and erase copies nobody reads.

    x.type_as(scores)                                x.to(torch.float32)
    scores.masked_fill(mask.expand_as(scores), c)    scores.masked_fill(mask, c)

    They would read scores that are gone.
    """
    for node in list(all_nodes(graph)):
        arguments = canonical_call(node).arguments
        source, other = arguments.get("input"), arguments.get("other")
        if _is_unread_copy(node):
            node.graph.erase_node(node)
        elif isinstance(other, fx.Node) and _takes_dtype(node, other):
            node.op, node.target = "call_function", torch.Tensor.to
            node.args, node.kwargs = (source, fake_value(other).dtype), {}
        elif isinstance(other, fx.Node) and _is_broadcast(node, other):
            assert isinstance(source, fx.Node), "it is the tensor that is expanded"
            node.replace_all_uses_with(source)
            node.graph.erase_node(node)


def _reads_nothing(user: fx.Node, node: fx.Node) -> bool:
    return (
        _is_unread_copy(user) or _takes_dtype(user, node) or _is_broadcast(user, node)
    )


def _is_unread_copy(node: fx.Node) -> bool:
    """Tell whether a call copies what nobody reads: x-transformers keeps scores so."""
    return spelled(node) == "clone" and not node.users


def _takes_dtype(user: fx.Node, node: fx.Node) -> bool:
    """Tell whether a call is x.type_as(node), on one device."""
    arguments = canonical_call(user).arguments if spelled(user) == "to" else {}
    source, other = arguments.get("input"), arguments.get("other")
    if other is not node or source is node or not isinstance(source, fx.Node):
        return False
    same: bool = fake_value(source).device == fake_value(node).device
    return same


def _is_broadcast(user: fx.Node, node: fx.Node) -> bool:
    """Tell whether a call is x.expand_as(node), for calls that would broadcast x."""
    arguments = canonical_call(user).arguments if spelled(user) == "expand_as" else {}
    if arguments.get("other") is not node or arguments.get("input") is node:
        return False
    return all(
        spelled(x).removesuffix("_") in _BROADCASTING and node in x.all_input_nodes
        for x in user.users
    )


_BROADCASTING = frozenset({"masked_fill", "where", "add", "sub", "mul"})


def _is_statement(node: fx.Node) -> bool:
    called = node.op in ("call_function", "call_method")
    return called and not node.users and is_in_place(node)
