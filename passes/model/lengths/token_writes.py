"""Rules of writes into a value that has tokens."""

from __future__ import annotations

import operator
from typing import Any

import torch.fx as fx
from torch import Tensor

from ...graph.calls import canonical_call
from ...graph.effects import result_is_argument, written_by
from .padded_graph import PaddedGraph
from .positions import is_fixed, is_of_numbers, memory_of, of_all_tokens, parts_of
from .sizes import Found, Unproved, with_sizes


def written(graph: PaddedGraph, node: fx.Node) -> Found:
    """Check a call in place, which has to write every token from that token alone.

    Returns the tokens of its result. Raises: Unproved.
    """
    call = canonical_call(node)
    base, *other_bases = written_by(node)
    if other_bases or graph.tokens(base) is None:
        raise Unproved("it writes to something else than tokens")
    if memory_of(base).op == "placeholder":  # the program has a copy
        raise Unproved("it writes to an input")
    if call.name == "setitem":
        _assigned(graph, base, *node.args[1:])
        return None
    if call.overload is None or not result_is_argument(node):
        raise Unproved("it writes to some of the tokens")
    tokens = graph.node_by_token(node)
    if tokens != graph.tokens(base):
        raise Unproved("it writes to something else than tokens")
    return tokens


def _assigned(graph: PaddedGraph, x: fx.Node, index: Any, value: Any) -> None:
    """Check x[..., :8] = y: a part of every token, or some tokens from the first on."""
    index, tokens = with_sizes(index), graph.tokens(x)
    if tokens is None or not is_of_numbers(index):
        raise Unproved("it writes to tokens that are picked by values")
    parts, place = parts_of(x, index, tokens)
    part, rest = parts[place], of_all_tokens(parts, place)
    if graph.tokens(value) is not None:
        if part == slice(None) and graph.by_token(_assign, x, rest, value) == tokens:
            return
    elif part == slice(None):
        graph.by_token(operator.getitem, x, rest)
        return
    elif is_fixed(part, tokens):
        return
    raise Unproved("it writes to some of the tokens")


def _assign(x: Tensor, index: Any, value: Any) -> Tensor:
    x[index] = value
    return x
