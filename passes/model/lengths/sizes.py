"""Read what the sizes of values say of the padded length P."""

from __future__ import annotations

from typing import Any

import sympy  # type: ignore[import-untyped]  # sympy ships no type information
import torch
import torch.fx as fx
from torch import Tensor
from torch.utils import _pytree as pytree

from cpcompile.geometry.lengths import is_symbol

from ...graph.calls import canonical_call
from ...graph.nodes import fake_value
from ...graph.sequence_tokens import TokenAxis, Tokens
from .padded_tokens import Found, Unproved

# Arguments that may be a number of tokens: they say how far values reach.
_SIZES = {"size", "shape", "sizes", "end", "length"}


COMPUTES = "it computes with the number of tokens"


class Sizes:
    """Reader of the sizes in a graph of the padded length `length`."""

    def __init__(self, length: torch.SymInt) -> None:
        self.length = length.node.expr

    def extra_of(self, size: Any) -> int | None:
        """Return size - P, if that is a number."""
        if not is_symbol(size):
            return None
        rest = size.node.expr - self.length
        return int(rest) if rest.is_Integer else None

    def reaching(self, value: Any) -> list[int]:
        """Return the dimensions of a tensor whose size depends on P."""
        sizes: tuple[Any, ...] = tuple(value.shape)
        return [
            dim
            for dim, size in enumerate(sizes)
            if is_symbol(size) and self.length in size.node.expr.free_symbols
        ]

    def of_input(self, value: Any) -> Tokens | None:
        """Return where an input of the graph has its tokens."""
        dims = self.reaching(value) if isinstance(value, Tensor) else []
        if not dims:
            return None
        tokens = Tokens(TokenAxis(dims[0]))
        self.check(value, tokens)
        return tokens

    def check(self, value: Any, found: Found) -> None:
        """Raise Unproved if the shape of a value says something else of its tokens."""
        if isinstance(found, tuple):
            for one, tokens in zip(pytree.tree_leaves(value), found, strict=True):
                self.check(one, tokens)
            return
        dims = self.reaching(value) if isinstance(value, Tensor) else []
        if found is None:
            if dims:
                raise Unproved("a size depends on the length")
            return
        axis = found.axis
        whole = (self.length + found.extra) * axis.outer * axis.inner
        size = value.shape[axis.dim]
        same = is_symbol(size) and sympy.expand(size.node.expr - whole) == 0
        if dims != [axis.dim] or not same:
            raise Unproved("several sizes depend on the length, or one in another way")


def is_number(value: Any) -> bool:
    """Tell whether a value that is no tensor is a symbolic size, or has one."""
    sizes = value if isinstance(value, tuple | list) else [value]
    return any(map(is_symbol, sizes))


def check_numbers(node: fx.Node) -> None:
    """Raise Unproved if a number of tokens is more than a size to a call."""
    numbers = {x for x in node.all_input_nodes if is_number(fake_value(x))}
    call = canonical_call(node)
    if not numbers or call.name in ("getitem", "setitem"):  # see indexed
        return
    others: list[fx.Node] = []
    given = [x for name, x in call.arguments.items() if name not in _SIZES]
    fx.map_arg(given, others.append)
    if not call.name or not numbers.isdisjoint(others):
        raise Unproved(COMPUTES)
