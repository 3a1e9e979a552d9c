"""Read masks of a symbolic length S where it is longest, and write them for every S.

    arange(S), le, index(attention_mask, arange(S)), bitwise_and, ...
      ->  the same calls for 131101 positions, which are read
      ->  cp_constant_until(S): key ranges of S rows, aten.where(index(...), ...): ids

A length may say only how far values reach: as a size, or where an arange or a slice
ends. Then every element is computed in the same way whatever the length is. A mask of S
tokens is the top left part of the mask of a longer sequence, and what is read of the
longer one holds for S as well. Anything else, such as a flip, raises LengthNotSymbolic,
and the graph is compiled per length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]  # sympy ships no type information
import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.lengths import (
    LengthNotSymbolic,
    Size,
    expected,
    is_same,
    is_symbol,
    upper_limit,
)
from cpcompile.refusals import check_refusal
from cpcompile.torch_private.fake_tensors import FakeTensorMode

from ....graph.constant_arguments import Constant
from ..analysis.mask_program import MaskProgram, Unreadable
from ..analysis.mask_writer import MaskWriter, cp_constant_around, cp_constant_until
from ..analysis.vectors import normalising
from ..analysis.views import View
from .length_invariance import check_alike

aten = torch.ops.aten

# Masks are read at _LONGEST tokens, or at _FACTOR times the length that is compiled if
# that is more. Primes, so that no other size is as large.
_LONGEST = 131_101
_FACTOR = 11


@dataclass(frozen=True)
class LongestMask:
    """A program of a symbolic length, and the same at `tokens`, which can be read.

    sources: by node of `program`, the one of `symbolic` that it is a copy of.
    """

    symbolic: MaskProgram
    program: MaskProgram
    sources: dict[fx.Node, fx.Node]
    length: torch.SymInt
    tokens: int


def longest_length(length: torch.SymInt) -> int:
    """Return the greatest length at which masks of a symbolic length are read."""
    here = expected(length)
    return max(here, min(max(_LONGEST, _FACTOR * here), upper_limit(length) - 1))


def at_longest(
    symbolic: MaskProgram, length: torch.SymInt, fake_mode: FakeTensorMode
) -> LongestMask:
    """Copy a program to the longest length that it is read for.

    Raises: LengthNotSymbolic, if that says nothing of other lengths.
    """
    tokens = longest_length(length)
    at, graph = _Sizes(length, tokens), fx.Graph()
    copies: dict[fx.Node, Any] = {}
    sources: dict[fx.Node, fx.Node] = {}
    for node in symbolic.module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, int | torch.SymInt):
            copies[node] = at.number(value)
            continue
        copy = graph.node_copy(node, copies.__getitem__)
        copies[node], sources[copy] = copy, node
        if node.op != "output":
            with fake_mode, torch.no_grad():
                copy.meta["val"] = at.value(copy, value)
    inputs = {
        copies[node]: model
        for node, model in symbolic.inputs.items()
        if isinstance(copies[node], fx.Node)
    }
    module = fx.GraphModule(symbolic.module, graph)
    check_alike(module, sources)
    program = MaskProgram(module, copies[symbolic.result], inputs)
    shape = list(program.result.meta["val"].shape[-2:])
    if any(n not in (1, tokens) for n in shape):  # of a table that ends before
        raise LengthNotSymbolic(f"an attn_mask has {shape} for {tokens} tokens")
    return LongestMask(symbolic, program, sources, length, tokens)


class _Sizes:
    """Sizes and values of a program where the length is `tokens`."""

    def __init__(self, length: torch.SymInt, tokens: int) -> None:
        (symbol,) = length.node.expr.free_symbols
        per_symbol = int(length.node.expr.coeff(symbol))  # the symbol may be S / N
        self.tokens = tokens
        self.values = {symbol: sympy.Integer(tokens // per_symbol)}

    def number(self, size: Size) -> int:
        if not is_symbol(size):
            return int(size)
        assert isinstance(size, torch.SymInt)
        number = size.node.expr.xreplace(self.values)
        if not number.is_Integer:
            raise LengthNotSymbolic(f"an attn_mask has the size {size}")
        return int(number)

    def value(self, node: fx.Node, symbolic: Tensor) -> Any:
        """Compute the value of a node; `symbolic` is its value with symbols."""
        if any(n == self.tokens for n in symbolic.shape if not is_symbol(n)):
            raise LengthNotSymbolic(f"{node.name} of an attn_mask has {self.tokens}")
        if node.op != "call_function":
            shape, stride = symbolic.shape, symbolic.stride()
            layout = ([self.number(n) for n in x] for x in (shape, stride))
            return torch.empty_strided(
                *layout, dtype=symbolic.dtype, device=symbolic.device
            )
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        assert callable(node.target)
        try:
            return node.target(*args, **kwargs)
        except Exception as error:  # as of a buffer that does not reach so far
            check_refusal(error, f"a mask of {self.tokens} tokens")
            raise LengthNotSymbolic(
                f"{node.name} of an attn_mask fails at {self.tokens} tokens: {error}"
            ) from error


class AnyLengthWriter(MaskWriter):
    """Writer of nodes that serve every length up to the longest."""

    def __init__(self, longest: LongestMask, graph: fx.Graph, *args: Any) -> None:
        super().__init__(graph, *args)
        self.longest = longest
        self._copies = dict(longest.symbolic.inputs)
        self._length: fx.Node | None = None

    def constant(self, value: Tensor) -> fx.Node:
        """Insert a known tensor; its part up to this length, if it reaches farther."""
        if self.longest.tokens not in value.shape:
            return super().constant(value)
        return self._until(value, are_positions=False)

    def limits(self, value: Tensor) -> fx.Node:
        """Insert key ranges that are known, cut to this length and clamped to it."""
        return self._until(value, are_positions=True)

    def distances(self, value: Tensor) -> fx.Node:
        """Insert values that are known, at the distances that this length has."""
        constant = Constant(value.detach().contiguous().to(self.device))
        return self.call(cp_constant_around, constant, self.length, self.longest.tokens)

    def _until(self, value: Tensor, are_positions: bool) -> fx.Node:
        constant = Constant(value.detach().contiguous().to(self.device))
        cut = (self.length, self.longest.tokens, are_positions)
        return self.call(cp_constant_until, constant, *cut)

    def size(self, tokens: int) -> int | fx.Node:
        return self.length if tokens == self.longest.tokens else tokens

    @property
    def length(self) -> fx.Node:
        """Number of tokens, as a node."""
        if self._length is None:
            self._length = self._find_length()
        return self._length

    def _find_length(self) -> fx.Node:
        length = self.longest.length
        for node in self.longest.symbolic.module.graph.nodes:
            value = node.meta.get("val")
            if _is_length(value, length):
                return self._copied(node)
            for dim, size in enumerate(getattr(value, "shape", ())):
                if _is_length(size, length):
                    return self.call(torch.Tensor.size, self._copied(node), dim)
        raise LengthNotSymbolic(f"no size of an attn_mask is {length}")

    def normal(self, node: fx.Node, view: View) -> fx.Node:
        """Write what `vectors.normal` computes of a value, as calls for every length.

        Raises: Unreadable, where only some positions count.
        """
        if any(a.positions is not None and len(a.positions) > 1 for a in view.axes):
            raise Unreadable(f"some positions of {view.node.name} count")
        for target, *args in normalising(view):
            if target is aten.reshape.default:
                (shape,) = args
                args = [[-1 if n == self.longest.tokens else n for n in shape]]
            operands = (self.constant(a) if isinstance(a, Tensor) else a for a in args)
            node = self.call(target, node, *operands)
        return node

    def copy(self, node: fx.Node) -> fx.Node:
        """Copy a node of the program with all that it needs, for every length."""
        source = self.longest.sources.get(node)
        if source is None:  # a constant that takes many steps
            return self.constant(getattr(self.program.module, str(node.target)))
        return self._copied(source)

    def _copied(self, node: fx.Node) -> fx.Node:
        if node not in self._copies:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._copied)
            target = node.target
            if node.op == "get_attr":
                module = self.longest.symbolic.module
                copy = super().constant(getattr(module, str(target)))
            else:
                method = target is aten.sym_size.int
                copy = self.call(
                    torch.Tensor.size if method else target, *args, **kwargs
                )
            self._copies[node] = copy
        return self._copies[node]


def _is_length(value: Any, length: torch.SymInt) -> bool:
    return is_symbol(value) and is_same(value, length)
