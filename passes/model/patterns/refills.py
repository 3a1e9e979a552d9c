"""Read weights of which what the scores hide is set to zero after the softmax, too.

    weights = scores.masked_fill(hidden, -1e9).softmax(-1).masked_fill(hidden, 0)

A low number leaves a row that sees nothing the mean of its values, and -inf leaves it
NaN; set to zero, such a row gives 0, as it does by every strategy. In all other rows
these weights are zero already.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.fx as fx

from ...graph.calls import canonical_call, spelled
from ...graph.effects import is_in_place, view_of
from .matched import Scores
from .scores import number_of

_MADE_ANEW = frozenset(
    {"tensor", "scalar_tensor", "full", "arange", "zeros", "ones", "tril", "triu"}
)


def refilled(scores: Scores, weights: fx.Node, user: fx.Node) -> Scores | None:
    """Return scores that hide by -inf where a call sets their weights to zero.

    None if the call is another, or sets others to zero.
    """
    arguments = canonical_call(user).arguments
    if spelled(user) == "masked_fill" and arguments["input"] is weights:
        mask, value, kind = arguments["mask"], arguments["value"], "hide"
    elif spelled(user) == "where" and arguments.get("input") is weights:
        mask, value, kind = arguments["condition"], arguments["other"], "show"
    elif spelled(user) == "where" and arguments.get("other") is weights:
        mask, value, kind = arguments["condition"], arguments["input"], "hide"
    else:
        return None
    if number_of(value) != 0 or not isinstance(mask, fx.Node):
        return None
    for at, term in enumerate(scores.terms):
        others = (*scores.terms[:at], *scores.terms[at + 1 :])
        if term.low and not all(x.scales for x in others):
            continue  # in a row that sees nothing others have weights, which stay
        if term.kind != kind or term.regrouped != len(scores.regroupings):
            continue
        if _are_equal(term.node, mask) and not _written_between(term.node, user):
            hides = replace(term, number=float("-inf"))
            return replace(
                scores, terms=(*scores.terms[:at], hides, *scores.terms[at + 1 :])
            )
    return None


def _are_equal(one: object, other: object) -> bool:
    """Tell whether two arguments are the same, or are computed alike of the same."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_are_equal(*pair) for pair in pairs)
    if not (isinstance(one, fx.Node) and isinstance(other, fx.Node)):
        return type(one) is type(other) and one == other
    if one is other:
        return True
    if one.target != other.target or one.op != other.op or not _depends_alone(one):
        return False
    named = [*one.kwargs.items()], [*other.kwargs.items()]
    return _are_equal((*one.args, *named[0]), (*other.args, *named[1]))


def _depends_alone(node: fx.Node) -> bool:
    """Tell whether a call gives the same for the same arguments, each time."""
    if node.op not in ("call_function", "call_method") or is_in_place(node):
        return False
    overload = canonical_call(node).overload
    pointwise = overload is not None and torch.Tag.pointwise in overload.tags
    is_random = (
        overload is not None and torch.Tag.nondeterministic_seeded in overload.tags
    )
    known = pointwise or view_of(node) is not None or spelled(node) in _MADE_ANEW
    return known and not is_random


def _written_between(mask: fx.Node, user: fx.Node) -> bool:
    """Tell whether anything is written between a mask and a call that uses it again."""
    node = mask
    while node is not user and node.op != "output":
        node = node.next
        if node.op in ("call_function", "call_method") and is_in_place(node):
            return True
    return node is not user
