"""Turn a graph of S tokens into one of P tokens, a number that the ranks divide.

Before: l_tokens_ [2, s0]; after: l_tokens_ [2, s7], cp_padded_length = s7,
cp_real_length [] with s0. See Note [Padded lengths].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]  # sympy ships no type information
import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cpcompile.frontend.padding.padded_call import PaddedCalls
from cpcompile.frontend.padding.padded_symbol import padded_symbol
from cpcompile.frontend.symbolic_sizes import mark_fixed
from cpcompile.geometry.lengths import LengthNotSymbolic, is_symbol
from cpcompile.passes.graph.context import Context
from cpcompile.passes.graph.nodes import (
    all_nodes,
    fake_mode_of,
    fake_value,
    output_nodes,
)
from cpcompile.passes.graph.sequence_tokens import Padding
from cpcompile.torch_private import pytree

Around = Callable[[Callable[..., Any], Context], Callable[..., Any]]


def pad_graph(
    graph: fx.Graph, length: torch.SymInt, ranks: int, device_type: str
) -> tuple[Padding, Around]:
    """Put the padded length in place of `length`, in all values of a graph.

    Returns: the new inputs of the graph, which follow the others, and a function that
    wraps a program of P tokens as one for the caller's S tokens.

    Raises: LengthNotSymbolic for a graph that cannot be padded.
    """
    inputs = graph.find_nodes(op="placeholder")
    for node in all_nodes(graph):
        value = fake_value(node)
        if isinstance(value, DTensor) and any(map(is_symbol, value.shape)):
            raise LengthNotSymbolic("only plain tensors can be padded")
    symbol = padded_symbol(length, ranks)
    dims = {
        i: padded_dims
        for i, x in enumerate(inputs)
        if (padded_dims := _padded(x, length))
    }
    lengths = _Lengths(length, symbol)
    results = [fake_value(x) for x in output_nodes(graph)]
    for node in all_nodes(graph):
        if "example_value" not in node.meta or _is_length(node, length):
            continue
        before = fake_value(node)
        node.meta["example_value"] = pytree.tree_map(lengths.of, before)
        if node.op == "placeholder" and node.meta["example_value"] is not before:
            mark_fixed(node)
    with graph.inserting_after(inputs[-1]):
        real = graph.placeholder("cp_real_length")
    with graph.inserting_after(real):
        padded = graph.placeholder("cp_padded_length")
    padded.meta["example_value"] = symbol
    with fake_mode_of(graph):
        real.meta["example_value"] = torch.empty(
            (), dtype=torch.int64, device=device_type
        )
    for node in (real, padded):
        mark_fixed(node)
    for node in inputs:
        if _is_length(node, length):
            node.replace_all_uses_with(padded)

    def around(program: Callable[..., Any], ctx: Context) -> Callable[..., Any]:
        if len(ctx.findings.padded_results) != len(results):
            raise LengthNotSymbolic("pad_tokens has not run")
        pairs = zip(ctx.findings.padded_results, ctx.findings.outputs, strict=True)
        if any(tokens and placement is not None for tokens, placement in pairs):
            raise LengthNotSymbolic("a result leaves as a DTensor")
        calls = PaddedCalls(
            dims, ranks, results, ctx.findings.padded_results, device_type
        )
        return calls.around(program)

    return Padding(symbol, padded, real), around


def _is_length(node: fx.Node, length: torch.SymInt) -> bool:
    value = fake_value(node)
    return (
        node.op == "placeholder"
        and isinstance(value, torch.SymInt)
        and value.node.expr == length.node.expr
    )


def _padded(node: fx.Node, length: torch.SymInt) -> list[int]:
    """Return the dimensions of an input that have the tokens."""
    value, symbol = fake_value(node), length.node.expr
    if not isinstance(value, Tensor):
        return []
    sizes = {d: n.node.expr for d, n in enumerate(value.shape) if is_symbol(n)}  # type: ignore[attr-defined]
    with_length = [d for d, size in sizes.items() if symbol in size.free_symbols]
    if any(sizes[d] != symbol for d in with_length):
        raise LengthNotSymbolic(f"the size of {node.name} is computed from the length")
    if with_length and not value.is_contiguous():
        raise LengthNotSymbolic(f"{node.name} is not contiguous")
    return with_length


class _Lengths:
    """Replace the symbol of the length in values; views of one memory stay views."""

    def __init__(self, length: torch.SymInt, padded: torch.SymInt) -> None:
        environment = length.node.shape_env
        assert isinstance(environment, ShapeEnv)
        self.environment, self.symbol = environment, length.node.expr
        self.padded, self._memory = padded, {}  # type: ignore[var-annotated]

    def of(self, x: Any) -> Any:
        """Return the value of P tokens for a value of S tokens."""
        if isinstance(x, torch.SymInt):
            return self._size(x)
        if isinstance(x, torch.SymFloat | torch.SymBool):
            if self.symbol in x.node.expr.free_symbols:
                raise LengthNotSymbolic("it computes with the length")
            return x
        return self._tensor(x) if isinstance(x, Tensor) else x

    def _size(self, n: Any) -> Any:
        if not is_symbol(n) or self.symbol not in n.node.expr.free_symbols:
            return n
        expression = n.node.expr.xreplace({self.symbol: self.padded.node.expr})
        value = sympy.Integer(self.padded.node.hint)
        hint = self.environment.replace(expression).xreplace(
            {self.padded.node.expr: value}
        )
        if not hint.is_Integer:
            raise LengthNotSymbolic(f"the size {n} depends on others")
        return self.environment.create_symintnode(expression, hint=int(hint))

    def _tensor(self, x: Tensor) -> Tensor:
        layout = (*x.shape, *x.stride(), x.storage_offset())
        if all(self._size(n) is n for n in layout):
            return x
        mode = x.fake_mode  # type: ignore[attr-defined]  # of a fake tensor
        shape, stride = ([self._size(n) for n in y] for y in (x.shape, x.stride()))
        with mode, torch.no_grad():
            new = torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device)
            try:
                memory = x.untyped_storage()._cdata
            except NotImplementedError:  # a tensor inside of vmap has none
                return new
            if memory not in self._memory:
                self._memory[memory] = new
            elif self._memory[memory].dtype == x.dtype:
                offset = self._size(x.storage_offset())
                new = self._memory[memory].as_strided(shape, stride, offset)
        return new.requires_grad_() if x.requires_grad else new
