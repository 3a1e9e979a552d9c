"""Write what was read of a mask into the graph: integers per token.

key_ranges = cp_constant()                                  known
kv_segment_ids  = aten.where(index(attention_mask, ...), 0, -1)  from data: calls
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.geometry.lengths import expected, is_symbol
from cpcompile.torch_private.fake_tensors import (
    FakeTensorMode,
    enable_python_dispatcher,
)

from ....graph.constant_arguments import Constant
from ....graph.nodes import fake_value, insert_call
from .intervals import Intervals, KnownIntervals
from .mask_program import MaskProgram, whole
from .vectors import Vector, normalising
from .views import View

aten = torch.ops.aten


class MaskWriter:
    """Writer of nodes for one program, at the insertion point of a graph."""

    def __init__(
        self,
        graph: fx.Graph,
        like: fx.Node,
        program: MaskProgram,
        fake_mode: FakeTensorMode,
        device: torch.device,
    ) -> None:
        self.graph, self.like, self.program = graph, like, program
        self.fake_mode, self.device = fake_mode, device
        self.written: list[fx.Node] = []
        self._copies: dict[fx.Node, fx.Node] = dict(program.inputs)
        self._vectors: dict[Vector, fx.Node] = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call, with its fake value."""
        with self.fake_mode, enable_python_dispatcher(), torch.enable_grad():
            values = fx.map_arg((args, kwargs), _plain_value)
            value = target(*values[0], **values[1])
        node = insert_call(
            self.graph, target, args, like=self.like, value=value, kwargs=kwargs
        )
        self.written.append(node)
        return node

    def constant(self, value: Tensor) -> fx.Node:
        """Insert a tensor that is known."""
        constant = Constant(value.detach().contiguous().to(self.device))
        return self.call(cp_constant, constant)

    def limits(self, value: Tensor) -> fx.Node:
        """Insert key ranges that are known."""
        return self.constant(value)

    def distances(self, value: Tensor) -> fx.Node:
        """Insert values that are known at all distances k - q, in one dimension."""
        return self.constant(value)

    def size(self, tokens: int) -> int | fx.Node:
        """Return a number of tokens as an argument of a call."""
        return tokens

    def undo(self) -> None:
        """Take everything that was written out of the graph again."""
        for node in reversed(self.written):
            self.graph.erase_node(node)
        self.written = []

    def key_ranges(self, key_ranges: Intervals, queries: int) -> fx.Node:
        """Write key ranges as int32 [B or 1, Sq, 2]."""
        if isinstance(key_ranges, KnownIntervals):
            pair = torch.cat([key_ranges.lo, key_ranges.hi], -1).to(torch.int32)
            return self.limits(pair.expand(-1, queries, -1))
        sides = [self._tokens(x, queries) for x in (key_ranges.lo, key_ranges.hi)]
        batch = max(x.meta["example_value"].shape[0] for x in sides)
        shape = [batch, self.size(queries)]
        sides = [self.call(aten.expand.default, x, shape) for x in sides]
        both = self.call(aten.stack.default, sides, -1)
        return self.call(aten._to_copy.default, both, dtype=torch.int32)

    def ids(self, vector: Vector, tokens: int) -> fx.Node:
        """Write segment ids as int32 [B or 1, tokens]."""
        if vector.value is not None:
            flat = vector.value.flatten(1).expand(-1, tokens)
            return self.constant(flat)
        return self._tokens(vector, tokens)

    def _tokens(self, vector: Vector, tokens: int) -> fx.Node:
        """Write a vector of one axis, without heads, as [B or 1, tokens]."""
        flat = self.call(aten.flatten.using_ints, self.vector(vector), 1)
        batch = flat.meta["example_value"].shape[0]
        return self.call(aten.expand.default, flat, [batch, self.size(tokens)])

    def vector(self, vector: Vector) -> fx.Node:
        """Write a vector in its four dimensions."""
        if vector not in self._vectors:
            self._vectors[vector] = self._new_vector(vector)
        return self._vectors[vector]

    def _new_vector(self, vector: Vector) -> fx.Node:
        if vector.value is not None:
            return self.constant(vector.value)
        if vector.view is not None:
            return self.normal(self.copy(vector.view.node), vector.view)
        args = [self.vector(x) if isinstance(x, Vector) else x for x in vector.args]
        return self.call(vector.target, *args, **vector.kwargs)

    def normal(self, node: fx.Node, view: View) -> fx.Node:
        """Write what `vectors.normal` computes of a value, as calls in the graph."""
        for target, *args in normalising(view):
            operands = (self.constant(a) if isinstance(a, Tensor) else a for a in args)
            node = self.call(target, node, *operands)
        return node

    def arranged(self, value: fx.Node, original: View, view: View) -> fx.Node:
        """Bring a value of `original` to the dimensions of `view`; both may be cut."""
        # A symbol is the only one: torch finds it out.
        sizes = [-1 if is_symbol(n) else int(n) for n in fake_value(value).shape]
        place = {axis.meaning: d for d, axis in enumerate(original.axes)}
        named = [
            place[a.meaning] for a in view.axes if a.meaning and a.meaning in place
        ]
        rest = [d for d in range(len(sizes)) if d not in named]
        value = self.call(aten.permute.default, value, rest + named)
        shape = [
            sizes[place[a.meaning]] if a.meaning in place else 1 for a in view.axes
        ]
        return self.call(aten.reshape.default, value, shape)

    def copy(self, node: fx.Node) -> fx.Node:
        """Copy a node of the program into the graph, with all that it needs."""
        if node not in self._copies:
            self._copies[node] = self.copy_call(node, {})
        return self._copies[node]

    def copy_call(self, node: fx.Node, replacements: dict[fx.Node, fx.Node]) -> fx.Node:
        """Copy a node of the program, where some of what it needs is known."""
        if node.op == "get_attr":
            return self.constant(getattr(self.program.module, str(node.target)))
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda n: replacements.get(n) or self.copy(n)
        )
        return self.call(node.target, *args, **kwargs)


def _plain_value(node: fx.Node) -> Any:
    value = node.meta["example_value"]
    return whole(value) if isinstance(value, DTensor) else value


def cp_constant(constant: Constant) -> Tensor:
    """Return a tensor that AOTAutograd takes for a constant.

    It would not take a buffer, of which Dynamo knows nothing.
    """
    value: Tensor = aten.lift_fresh_copy.default(constant.value)
    return value


def cp_constant_until(
    constant: Constant, tokens: int, longest: int, are_positions: bool
) -> Tensor:
    """Cut a constant to a smaller number of tokens in all dimensions with `longest`.

    are_positions: whether the numbers of the constant are positions, too, which are
    clamped to that number of tokens.
    """
    part = cp_constant(constant)
    for dim, size in enumerate(constant.value.shape):
        if size == longest:
            part = part.narrow(dim, 0, tokens)
    return part.clamp(max=tokens) if are_positions else part


def cp_constant_around(constant: Constant, tokens: int, longest: int) -> Tensor:
    """Cut a constant of distances to a smaller number of tokens.

    One dimension of the constant has 2 * longest - 1 distances around 0.
    """
    dim = constant.value.shape.index(2 * longest - 1)
    return cp_constant(constant).narrow(dim, longest - tokens, 2 * tokens - 1)


def constant_value(node: fx.Node) -> Tensor | None:
    """Return the tensor that a node of a constant gives; None for any other node.

    With a symbol for a length, it is that of the length that is compiled.
    """
    longest = longest_value(node)
    if longest is None or node.target is cp_constant:
        return longest
    constant, length, *rest = node.args
    target: Any = node.target
    return target(constant, expected(fake_value(length)), *rest)  # type: ignore[no-any-return]


def longest_value(node: fx.Node) -> Tensor | None:
    """Return the tensor that a node of a constant gives; None for any other node.

    With a symbol for a length, it is that of the greatest length that is served.
    """
    if node.target not in (cp_constant, cp_constant_until, cp_constant_around):
        return None
    constant: Any = node.args[0]
    return constant.value  # type: ignore[no-any-return]
