"""Keep the sequence length of a Dynamo graph symbolic if it can be; fix other sizes.

See Note [Symbolic sequence lengths] in cpcompile/geometry/lengths.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import sympy  # type: ignore[import-untyped]  # sympy ships no type information
import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from cpcompile.frontend.inputs import is_parameter, layout_of_input
from cpcompile.frontend.meshes import real_input
from cpcompile.geometry.layout import Layout
from cpcompile.geometry.lengths import expected, is_symbol, require
from cpcompile.passes.graph.nodes import all_nodes, fake_value
from cpcompile.ranks import layout_marks
from cpcompile.ranks.shardings import check_dim
from cpcompile.torch_patches import symbolic_tracing, tracing
from cpcompile.torch_patches.in_flight import arrived
from cpcompile.torch_private import pytree
from cpcompile.torch_private.fake_tensors import SymT, symbol_is_type

# Marks a node whose example has symbols for sizes that guards have fixed.
_FIXED = "cp_fixed_sizes"


def symbolic_length(
    graph: fx.Graph, named: dict[fx.Node, tuple[str, int]], mesh: DeviceMesh, axis: int
) -> torch.SymInt | None:
    """Return the length of the sequence if it is a symbol and may stay one.

    See Note [Symbolic sequence lengths]. The result is None for inputs of several
    lengths: the guards of a program are on one length.
    """
    ranks = mesh.size(axis)
    values = map(fake_value, graph.find_nodes(op="placeholder"))
    if any(isinstance(x, DTensor) and x.device_mesh != mesh for x in values):
        return None  # shards of shards have fixed sizes
    if any(
        layout_of_input(node) is not Layout.CONTIGUOUS
        for node in graph.find_nodes(op="placeholder")
    ):
        return None  # a permutation is for a fixed number of tokens
    sizes = list(_sequence_sizes(graph, named, axis))
    symbols = [size for size, _ in sizes if is_symbol(size)]
    if not symbols:
        return None
    length: torch.SymInt = symbols[0]
    value = expected(length)
    if value < 2 * ranks or any(expected(n) != value for n in symbols):
        return None
    for n in symbols:
        require(n == length)
    require(length >= 2 * ranks)
    if value % ranks:
        return length if all(local is None for _, local in sizes) else None
    for size, local in sizes:
        if is_symbol(size) and local is not None:
            require(size == local * ranks)
    require(length % ranks == 0)
    return length


def _sequence_sizes(
    graph: fx.Graph, named: dict[fx.Node, tuple[str, int]], axis: int
) -> Iterator[tuple[Any, Any]]:
    """Yield the global size of each sequence dim, with the local size for DTensors."""
    for node in graph.find_nodes(op="placeholder"):
        value = fake_value(node)
        if isinstance(value, DTensor):
            placement = value.placements[axis]
            if isinstance(placement, Shard) and not is_parameter(node):
                dim = placement.dim
                yield value.shape[dim], value.to_local().shape[dim]
        elif node in named:
            name, dim = named[node]
            dim = check_dim(f"options['shard'][{name!r}]", value, dim)
            yield value.shape[dim], None


def rows_of(named: dict[fx.Node, tuple[str, int]]) -> torch.SymInt | None:
    """Return the first size of the inputs with the sequence, if it is a symbol.

    DTensors have none here: their global shapes are guarded.
    """
    for node, (_, dim) in named.items():
        value = fake_value(node)
        if dim > 0 and not isinstance(value, DTensor) and is_symbol(value.shape[0]):
            rows: torch.SymInt = value.shape[0]
            return rows
    return None


def specialize_sizes(
    graph: fx.Graph,
    length: torch.SymInt | None = None,
    rows: torch.SymInt | None = None,
) -> None:
    """Replace symbolic sizes by their values, but for those of `length` and `rows`.

    Asking a symbol for its value adds a guard: Dynamo recompiles for other values.
    """
    symbols = set[sympy.Symbol]()
    for n in (length, rows):
        symbols |= set() if n is None else n.node.expr.free_symbols
    for node in graph.find_nodes(op="placeholder"):
        value = fake_value(node)
        sizes: list[Any] = [value] if isinstance(value, torch.SymInt) else []
        if isinstance(value, Tensor):
            sizes += [*value.shape, *value.stride()]
        if isinstance(value, DTensor):
            local = value.to_local()
            sizes += [*local.shape, *local.stride()]
        for size in sizes:
            if is_symbol(size) and not size.node.expr.free_symbols <= symbols:
                if length is not None and expected(size) == expected(length):
                    require(size == length)  # as in a mask, which nothing shards
                else:
                    for symbol in size.node.expr.free_symbols - symbols:
                        size.node.shape_env.evaluate_expr(symbol)
        if isinstance(value, DTensor) and not is_parameter(node):
            argument = node.meta.get("grapharg")
            if argument is not None:
                if real_input(node) is argument.example:
                    tracing.guard_global_shape(argument.source, value.shape)
                tracing.guard_equal(argument.source, layout_marks.ATTRIBUTE)
    _specialize_floats(graph)
    fixed = functools.cache(symbolic_tracing.with_fixed_sizes)  # nodes share values
    for node in all_nodes(graph):
        if "example_value" not in node.meta:
            continue
        kind = Tensor if node.op == "placeholder" else DTensor
        value = pytree.tree_map_only(kind, fixed, fake_value(node))
        if node.op == "placeholder" and value is not fake_value(node):
            mark_fixed(node)
        node.meta["example_value"] = value


def _specialize_floats(graph: fx.Graph) -> None:
    """Replace floats that Dynamo hands over as tensors by their values.

    These are the floats that `read_floats` fixes. What is computed from them alone is
    replaced as well, and also inside of checkpoint regions.
    """
    for node in list(all_nodes(graph)):
        value = fake_value(node)
        if not isinstance(value, torch.SymFloat) or not all(
            symbol_is_type(x, SymT.FLOAT) for x in value.node.expr.free_symbols
        ):
            continue
        number = float(value)
        for user in list(node.users):
            user.args, user.kwargs = fx.map_arg(
                (user.args, user.kwargs),
                lambda x: number if x is node else x,  # noqa: B023
            )
        if node.op != "placeholder":
            node.graph.erase_node(node)


def mark_fixed(node: fx.Node) -> None:
    """Have the fake value of an input compiled instead of what the caller passed."""
    node.meta[_FIXED] = True


def example_of(node: fx.Node, example: Any) -> Any:
    """Return the value that is compiled for an input without a local part.

    It is the caller's value, or the fake one if `mark_fixed` has marked the input, such
    as one with integers for sizes that guards have fixed.
    """
    return fake_value(node) if _FIXED in node.meta else arrived(example)
