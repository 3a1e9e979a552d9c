"""Read what the sizes of values say of the padded length P."""

from __future__ import annotations

from typing import Any

import sympy  # type: ignore[import-untyped]  # sympy ships no type information
import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.lengths import is_symbol
from cpcompile.torch_private import pytree

from ...graph.nodes import fake_value
from ...graph.sequence_tokens import TokenAxis, Tokens


class Unproved(Exception):
    """A call may read the padding, as far as is known."""


# Of a value: None if it has no tokens of the sequence, its tokens, or one of these for
# each of several results.
Found = Tokens | None | tuple[Tokens | None, ...]


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
        sizes: tuple[Any, ...] = tuple(value.shape) if isinstance(value, Tensor) else ()
        return [
            dim
            for dim, size in enumerate(sizes)
            if is_symbol(size) and self.length in size.node.expr.free_symbols
        ]

    def of_input(self, value: Any) -> Tokens | None:
        """Return where an input of the graph has its tokens."""
        dims = self.reaching(value)
        tokens = Tokens(TokenAxis(dims[0])) if dims else None
        self.check(value, tokens)
        return tokens

    def check(self, value: Any, result_tokens: Found) -> None:
        """Raise Unproved if the shape of a value says something else of its tokens."""
        all_tokens = (
            result_tokens if isinstance(result_tokens, tuple) else (result_tokens,)
        )
        for one, tokens in zip(pytree.tree_leaves(value), all_tokens, strict=True):
            dims = self.reaching(one)
            if not dims and tokens is None:
                continue
            if tokens is None:
                raise Unproved("a size depends on the length")
            axis = tokens.axis
            whole = (self.length + tokens.extra) * axis.outer * axis.inner
            size = one.shape[axis.dim]
            same = is_symbol(size) and sympy.expand(size.node.expr - whole) == 0
            if dims != [axis.dim] or not same:
                raise Unproved("several sizes depend on the length, or one otherwise")


def is_number(value: Any) -> bool:
    """Tell whether a value that is no tensor is a symbolic size, or has one."""
    sizes = value if isinstance(value, tuple | list) else [value]
    return any(map(is_symbol, sizes))


def with_sizes(index: Any) -> Any:
    """Return an index with the values of its sizes; tensors stay nodes."""

    def value(x: fx.Node) -> Any:
        fake = fake_value(x)
        if isinstance(fake, torch.SymInt) and not is_symbol(fake):
            return int(fake)  # its guard is there
        return x if isinstance(fake, Tensor) else fake

    return fx.map_arg(index, value)
