"""Who reads a value of a graph, besides the one that matters."""

from __future__ import annotations

import torch.fx as fx

from cpcompile.passes.graph.calls import canonical_call, spelled
from cpcompile.passes.graph.effects import is_in_place, written_by


def shifts_of(node: fx.Node, reader: fx.Node) -> tuple[fx.Node, ...]:
    """The calls that compute x.max(-1, keepdim=True).values in x - that, if any."""
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
    """The statements that write to a value before it is read, in order."""
    writes = [x for x in node.users if _is_statement(x) and written_by(x) == [node]]
    others = {x for x in node.users if not _reads_dtype(x, node)}
    if {x for x in others if not is_unread_copy(x)} != {*writes, *readers}:
        return None
    found, at = [], node
    while at is not reader and at.op != "output":
        at = at.next
        if at in writes:
            found.append(at)
    return found if len(found) == len(writes) else None


def is_unread_copy(node: fx.Node) -> bool:
    """Whether a call copies what nobody reads: x-transformers keeps scores so."""
    return spelled(node) == "clone" and not node.users


def _reads_dtype(user: fx.Node, node: fx.Node) -> bool:
    """Whether a call is weights.type_as(node)."""
    given = canonical_call(user).arguments
    takes = given.get("other") is node and given.get("input") is not node
    return takes and spelled(user) == "to"


def _is_statement(node: fx.Node) -> bool:
    called = node.op in ("call_function", "call_method")
    return called and not node.users and is_in_place(node)
