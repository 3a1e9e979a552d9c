"""The part of a graph that computes a mask, as a program without side effects.

    zeros, masked_fill_, tril, setitem, _vmap_increment_nesting, ...  (Dynamo's nodes)
      ->  aten.full, aten.where, aten.arange, aten.ge, ...    (functional, fewer words)

Dynamo's graphs are not functional. A write into memory that the mask reads, by whatever
alias, belongs to the mask without an edge to it; so do the nodes that begin and end a
vmap. Inputs of checkpoint regions are resolved to the nodes that are passed for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx

from cpcompile.geometry.lengths import Size, is_symbol
from cpcompile.refusals import check_refusal
from cpcompile.torch_private.fake_tensors import (
    FakeTensorMode,
    enable_python_dispatcher,
)
from cpcompile.torch_private.operators import lazy_load_decompositions, predispatch

from ....graph.attention_calls import is_attention
from ....graph.calls import function_of
from ....graph.context import MaskSource
from ....graph.effects import is_in_place, view_of, written_by
from ....graph.nodes import expected_shape, fake_value, reached, storage
from .decompositions import MASK_DECOMPOSITIONS

# They have no edge to the values between them. Seen in torch 2.13.
VMAP_MARKS = (
    predispatch._vmap_increment_nesting,
    predispatch._vmap_decrement_nesting,
    lazy_load_decompositions,
)
VMAP_EDGES = (predispatch._add_batch_dim, predispatch._remove_batch_dim)


class Unreadable(Exception):
    """A mask, or a part of one, is computed in a way that cannot be seen through."""


@dataclass(frozen=True)
class MaskProgram:
    """A functional program; `inputs` are the model's nodes for its placeholders."""

    module: fx.GraphModule
    result: fx.Node
    inputs: dict[fx.Node, fx.Node]


def resolve(node: fx.Node, outer: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return the node that gives a placeholder of a checkpoint region its value."""
    while node in outer:
        node = outer[node]
    return node


def source_of(
    mask: fx.Node,
    before: Sequence[fx.Node],
    writes: Sequence[fx.Node],
    outer: dict[fx.Node, fx.Node],
) -> MaskSource:
    """Find the nodes that compute `mask`, with the writes in place that it depends on.

    before: all nodes that run before its use, in order; writes: those in place. A write
    after all reads of its memory for the mask does not count: the count of a cache, for
    example, is raised after its use. The nodes of the mask have to stay before such a
    write.

    Raises: Unreadable.
    """
    mask = resolve(mask, outer)
    sources: set[fx.Node] = set()
    memory: set[int] = set()

    def add(start: fx.Node) -> None:
        new = reached([start], read_by).keys() - sources
        sources.update(new)
        memory.update(map(memory_of, new))

    def read_by(node: fx.Node) -> list[fx.Node]:
        return [resolve(x, outer) for x in node.all_input_nodes]

    add(mask)
    place = {node: number for number, node in enumerate(before)}

    def is_read_later(write: fx.Node) -> bool:
        """Tell whether the nodes of the mask read the written memory after it."""
        written = {memory_of(x) for x in written_by(write)}
        return memory_of(mask) in written or any(
            place.get(node, len(before)) > place[write]
            and any(
                memory_of(resolve(x, outer)) in written for x in node.all_input_nodes
            )
            for node in sources
        )

    growing = True
    while growing:
        growing, late = False, []
        for write in writes:
            if write in sources or all(
                memory_of(x) not in memory for x in written_by(write)
            ):
                continue
            if is_read_later(write):
                add(write)
                growing = True
            else:
                late.append(write)
    if any(n.target in VMAP_EDGES for n in sources if n.op == "call_function"):
        sources |= {n for n in before if n.target in VMAP_MARKS}
    starts = ("placeholder", "get_attr")
    nodes = tuple(n for n in before if n in sources and n.op not in starts)
    inputs = tuple(n for n in before if n in sources and n.op in starts)
    if len(nodes) + len(inputs) < len(sources):
        raise Unreadable("it depends on the result of a checkpoint region")
    _check(nodes, inputs)
    return MaskSource(mask, nodes, inputs, outer, late[0] if late else None)


def writes_of(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the calls that write in place."""
    calls = ("call_function", "call_method")
    return [n for n in nodes if n.op in calls and is_in_place(n)]


def trace(source: MaskSource, fake_mode: FakeTensorMode) -> MaskProgram:
    """Trace a mask to a functional program, on whole sequences.

    Sizes that are symbols stay so, see any_length. Raises: Unreadable.
    """
    outer = source.outer

    def call(*tensors: Any) -> Any:
        values = dict(zip(source.inputs, tensors, strict=True))
        for node in source.nodes:
            args, kwargs = fx.map_arg(
                (node.args, node.kwargs), lambda n: values[resolve(n, outer)]
            )
            expected_value = fake_value(node)
            if isinstance(expected_value, torch.SymFloat):  # as with dynamic=True
                values[node] = float(expected_value)
                continue
            values[node] = function_of(node)(*args, **kwargs)
            _compare(node, values[node])
        return values[source.mask]

    try:
        # What decomposes in C++ may ask a symbol for its value.
        python = enable_python_dispatcher() if has_symbols(source) else nullcontext()
        with fake_mode, python, torch.no_grad():
            inputs = [whole(fake_value(n)) for n in source.inputs]
            steps = make_fx(call)(*inputs)
            functional = torch.func.functionalize(steps, remove="mutations")
            module = make_fx(functional, decomposition_table=MASK_DECOMPOSITIONS)(
                *inputs
            )
    except Exception as error:  # whatever a model does that cannot be traced so
        check_refusal(error, "the trace of a mask")
        raise Unreadable(f"{type(error).__name__}: {error}") from error
    for node in module.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise Unreadable(f"{node.name} is random")
    placeholders = module.graph.find_nodes(op="placeholder")
    for placeholder, value in zip(placeholders, inputs, strict=True):
        placeholder.meta["val"] = value  # torch notes no numbers
    (output,) = module.graph.find_nodes(op="output")
    result = output.args[0]
    if not isinstance(result, fx.Node):
        raise Unreadable("the mask is not a tensor")
    return MaskProgram(
        module, result, dict(zip(placeholders, source.inputs, strict=True))
    )


def _check(nodes: tuple[fx.Node, ...], inputs: tuple[fx.Node, ...]) -> None:
    starts = {memory_of(n) for n in inputs}
    for node in nodes:
        if is_attention(node) or node.op not in ("call_function", "call_method"):
            raise Unreadable(f"it depends on {node.name}")
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise Unreadable(f"it depends on {node.name}, which runs a graph")
        if is_in_place(node) and any(memory_of(x) in starts for x in written_by(node)):
            raise Unreadable(f"{node.name} writes into an input of the graph")


def memory_of(node: fx.Node) -> int:
    """Return a number that is equal for nodes that may share memory."""
    if isinstance(fake_value(node), DTensor):
        # Dynamo sees new memory where a shard is cut: go by the schemas of views.
        while (source := view_of(node)) is not None:
            node = source
    memory = storage(node)
    return id(node) if memory is None else memory


def has_symbols(source: MaskSource) -> bool:
    """Tell whether a size in what computes a mask is a symbol."""
    for node in (*source.inputs, *source.nodes):
        value = fake_value(node)
        sizes: Iterable[Any] = value.shape if isinstance(value, Tensor) else (value,)
        if any(map(is_symbol, sizes)):
            return True
    return False


def whole(value: Any) -> Any:
    """Make a plain fake tensor of the global shape, to trace the global program."""
    if isinstance(value, torch.SymInt):
        return _size(value)
    if not isinstance(value, Tensor):
        return value
    layout = ([_size(n) for n in x] for x in (value.shape, value.stride()))
    return torch.empty_strided(*layout, dtype=value.dtype, device=value.device)


def _size(n: Size) -> Size:
    """Return a size as a number; a symbol stays one, unless guards have fixed it."""
    return n if is_symbol(n) else int(n)


def _compare(node: fx.Node, value: Any) -> None:
    """Raise Unreadable if a value has another shape or dtype than in the graph.

    A state that is not in the program, such as autocast, would change values.
    """
    expected = fake_value(node)
    if isinstance(expected, Tensor) and isinstance(value, Tensor):
        # A size that guards have fixed is a symbol still, unknown to the trace.
        same = expected_shape(expected) == expected_shape(value)
        if not same or expected.dtype != value.dtype:
            raise Unreadable(f"{node.name} is {value.shape} {value.dtype} by itself")
