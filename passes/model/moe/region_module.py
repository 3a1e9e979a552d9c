"""Write the calls of a region as a program for any number of rows, and try it."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.lengths import Size, expected, is_same, is_symbol, times
from cpcompile.refusals import check_refusal
from cpcompile.torch_private import pytree
from cpcompile.torch_private.fake_tensors import FakeTensorMode

from ...graph.calls import canonical_call, set_argument, spelled
from ...graph.dispatch_calls import NotByRows, need, number
from ...graph.nodes import fake_value
from .dispatch_region import DispatchRegion
from .row_kinds import CopiedRows, Counts, Ends, Fresh, Kinds, SumOfTokens, TokenRows


def row_module(
    region: DispatchRegion,
    results: list[fx.Node],
    place: dict[fx.Node, int],
    fake_mode: FakeTensorMode,
) -> fx.GraphModule:
    """Write module(rows, *row_arguments, *same_arguments) -> results.

    Raises: NotByRows if it is not for any number of rows.
    """
    graph = fx.Graph()
    rows = graph.placeholder("rows")
    inner: dict[fx.Node, fx.Node] = {}
    for x in (*region.row_arguments, *region.same_arguments):
        inner[x] = _input(graph, x)
    for node in sorted((*region.moved, *region.copied), key=place.__getitem__):
        kind, value = region.kinds[node], fake_value(node)
        per_token, size, dim = 0, None, 0
        if isinstance(kind, TokenRows | Fresh) and isinstance(value, Tensor):
            per_token, size = kind.per_token, value.shape[0]
        if isinstance(kind, CopiedRows):
            per_token, dim = kind.dim.outer, kind.dim.dim
            size = value.shape[dim]
        inner[node] = _copied(node, inner, rows, per_token, size, dim)
    graph.output(tuple(inner[x] for x in results))
    module = fx.GraphModule({}, graph)
    _try(module, region, inner, fake_mode)
    return module


# The arguments that are sizes of the result.
_SIZES = {
    "view": "size", "reshape": "shape", "expand": "size", "new_zeros": "size",
    "new_empty": "size", "arange": "end", "zeros": "size", "empty": "size",
    "unflatten": "sizes",
}  # fmt: skip


def _copied(
    node: fx.Node,
    inner: dict[fx.Node, fx.Node],
    rows: fx.Node,
    per_token: int,
    size: Size | None,
    dim: int = 0,
) -> fx.Node:
    """Copy a call into the graph of `rows`.

    size: that of dimension `dim` of its result, which becomes `per_token` times the
        rows; None changes nothing.
    """
    graph, symbols = rows.graph, list[fx.Node]()

    def argument(x: fx.Node) -> Any:
        if x in inner or not is_symbol(fake_value(x)):
            return inner[x] if x in inner else number(x)
        symbols.append(_input(graph, x))
        return symbols[-1]

    copied = graph.node_copy(node, argument)
    if size is not None:
        _scale(copied, rows, per_token, size, dim)
    for x in symbols:
        need(not x.users)  # it is more to the call than its first size
        graph.erase_node(x)
    return copied


def _scale(node: fx.Node, rows: fx.Node, per_token: int, size: Size, dim: int) -> None:
    """Make the size of dimension `dim` of a call a multiple of the rows.

    A size of -1, which torch is to find out, becomes a number: without any rows torch
    cannot tell it.
    """
    call = canonical_call(node)
    name = _SIZES.get(call.name, "")
    size_argument: Any = call.arguments.get(name)
    several = isinstance(size_argument, list | tuple)
    sizes = list(size_argument) if several else [size_argument]
    if call.name == "unflatten" and call.arguments["dim"] != 0:
        return
    if -1 in sizes and call.name in ("view", "reshape", "unflatten"):
        whole = fake_value(node).shape[: len(sizes)]
        sizes = list(whole)
    given = fake_value(sizes[dim]) if len(sizes) > dim else None
    if not isinstance(given, int | torch.SymInt) or not is_same(given, size):
        return
    with node.graph.inserting_before(node):
        new = node.graph.call_function(operator.mul, (rows, per_token))
    scaled = [*sizes[:dim], new, *sizes[dim + 1 :]]
    set_argument(node, name, scaled if several else new)


def _input(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """Add a placeholder that stands for a value from outside."""
    inside = graph.placeholder(x.name)
    inside.target = inside.name  # the program's own `rows` has the name that it has
    inside.meta["example_value"] = fake_value(x)
    return inside


def _try(
    module: fx.GraphModule,
    region: DispatchRegion,
    inner: dict[fx.Node, fx.Node],
    fake_mode: FakeTensorMode,
) -> None:
    """Raise NotByRows unless all shapes are right for another number of rows."""
    here = expected(region.tokens)
    tokens = here + 3
    values: dict[fx.Node, Any] = {}

    class ShapeRecorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            values[n] = super().run_node(n)
            return values[n]

    def other(x: fx.Node, has_rows: bool) -> Tensor:
        value = fake_value(x)
        sizes = [tokens, *value.shape[1:]] if has_rows else list(value.shape)
        need(not any(map(is_symbol, sizes)))
        return torch.empty(sizes, dtype=value.dtype, device=value.device)

    with fake_mode, torch.no_grad():
        arguments = [other(x, True) for x in region.row_arguments]
        arguments += [other(x, False) for x in region.same_arguments]
        try:
            ShapeRecorder(module).run(tokens, *arguments)
        except Exception as error:  # whatever a call does with such sizes
            check_refusal(error, "experts on another number of rows")
            raise NotByRows(str(error)) from error
    for node, copied in inner.items():
        if node in region.kinds and spelled(node) != "setitem":
            _check(
                region.kinds[node],
                fake_value(node),
                values[copied],
                region.tokens,
                here,
            )


def _check(kinds: Kinds, original: Any, computed: Any, tokens: Size, here: int) -> None:
    befores, afters = pytree.tree_leaves(original), pytree.tree_leaves(computed)
    of_each = kinds if isinstance(kinds, tuple) else (kinds,) * len(befores)
    for kind, before, after in zip(of_each, befores, afters, strict=True):
        sizes = list(before.shape)
        if isinstance(kind, CopiedRows):
            sizes[kind.dim.dim] = kind.dim.outer * (here + 3)
        elif not isinstance(kind, SumOfTokens | Counts | Ends):
            sizes[0] = times(sizes[0], tokens) * (here + 3)
        need(list(after.shape) == sizes)
