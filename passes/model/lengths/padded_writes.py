"""Writes into a value that has tokens."""

from __future__ import annotations

import operator

import torch.fx as fx

from ...graph.calls import canonical_call
from ...graph.effects import result_is_argument, view_of, written_by
from ...graph.nodes import fake_value
from ...graph.sequence_tokens import Tokens
from .creation_rules import sizes_in
from .indexing import indexed
from .padded_tokens import Found, Unproved
from .rule_context import Given, RuleContext


def written(reader: RuleContext, node: fx.Node, given: Given) -> Found:
    """Check a call in place, which has to write every token from that token alone.

    Returns the tokens of its result. Raises: Unproved.
    """
    call = canonical_call(node)
    (base,) = written_by(node)
    before = given.get(base)
    found: Found = None
    if call.name == "setitem":
        _assigned(reader, node, given)
    elif call.overload is None or not result_is_argument(node):
        raise Unproved("it writes to some of the tokens")
    else:
        found = reader.traced(node, given)
        reader.sizes.check(fake_value(node), found)
    if not before or (found and before.filled(None) != found):
        raise Unproved("it writes to something else than tokens")
    if _memory_of(base).op == "placeholder":  # the program has a copy
        raise Unproved("it writes to an input")
    return found


def check_unwritten(reader: RuleContext, x: fx.Node) -> None:
    """Raise Unproved if a write may go through a view of tokens of `x`, or show in it.

    The view is replaced by a copy. Writes of other graphs, as of a checkpoint region,
    may be to the same memory by another name.
    """
    memory = _memory_of(x)
    for node in reader.writes:
        written_to = map(_memory_of, written_by(node))
        if node.graph is not x.graph or memory in written_to:
            raise Unproved("tokens at the end are read of what is written to")


def _memory_of(x: fx.Node) -> fx.Node:
    """Return the value that `x` is a view of."""
    while (source := view_of(x)) is not None:
        x = source
    return x


def _assigned(reader: RuleContext, node: fx.Node, given: Given) -> None:
    """Check x[..., :8] = y: a part of every token, or some tokens from the first on."""
    x, index, value = node.args
    assert isinstance(x, fx.Node)
    if x not in given or any(n not in (x, value) for n in given):
        raise Unproved("it writes to something else than tokens")
    index = sizes_in(index)
    part = reader.masker.call(node, operator.getitem, x, index)
    try:
        found = indexed(part, index, given[x], reader.sizes.extra_of)
        dims = fake_value(part).dim()
    finally:
        node.graph.erase_node(part)
    new = given.get(value) if isinstance(value, fx.Node) else None
    if found is None and new is None:
        return  # tokens that are there for every length
    if not isinstance(found, Tokens) or not found.is_whole:
        raise Unproved("it writes to some of the tokens")
    if found.extra != given[x].extra:
        raise Unproved("it writes to some of the tokens")
    if new is None:
        return
    moved = new.axis.moved(new.axis.dim + dims - fake_value(value).dim())
    if (moved, new.extra) != (found.axis, found.extra):
        raise Unproved("it writes tokens to others")
