"""Make the function of a row of equal blocks, and call it in the place of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from ...graph.subgraph_calls import call_subgraph
from .call_sequence import is_constant
from .repeated_blocks import Block, Blocks, arguments_of, operands_of, views_to
from .signatures import signature

Row = tuple[fx.Node, ...]  # nodes that correspond to each other, one per block

_INHERITED = ("stack_trace", "nn_module_stack", "seq_nr")


def insert_calls(repeated: Blocks, attribute: str) -> None:
    """Replace every block by a call of one function; calls may stand out of order.

    attribute: the name by which the owning module gets the function.
    """
    blocks = repeated.blocks
    graph = blocks[0][0].graph
    owner = graph.owning_module
    assert owner is not None, "a graph that is compiled belongs to a module"
    results = sorted(set(_results(repeated)))
    body, operands = _body(blocks, results)
    setattr(owner, attribute, body)
    with graph.inserting_before(next(x for x in graph.nodes if x.op != "placeholder")):
        function = graph.get_attr(attribute)
    replaced: dict[fx.Node, fx.Node] = {}
    for k, block in enumerate(blocks):
        arguments = [replaced.get(row[k], row[k]) for row in operands]
        replaced |= _called(function, arguments, block, results, repeated.read)
    for block in reversed(blocks):
        for node in reversed(block):
            graph.erase_node(node)


def _called(
    function: fx.Node,
    operands: list[fx.Node],
    block: Block,
    results: list[int],
    read: tuple[int, ...],
) -> dict[fx.Node, fx.Node]:
    """Insert a call in the place of `block`, and views of what it returns.

    Returns what takes the place of calls of the block outside of the block.
    """
    inside, last = set(block), block[-1]
    meta = {name: last.meta[name] for name in _INHERITED if name in last.meta}
    with last.graph.inserting_before(last):
        items = call_subgraph(function, operands, meta)
        new = {block[i]: item for i, item in zip(results, items, strict=True)}
        for view in (x for i in read for x in views_to(block[i], inside)):
            if view not in new:
                new[view] = last.graph.node_copy(view, lambda x: new.get(x, x))
    for i in read:
        block[i].replace_all_uses_with(
            new[block[i]],
            delete_user_cb=lambda user: user not in inside,
            propagate_meta=False,
        )
    return new


def _results(repeated: Blocks) -> Iterator[int]:
    """Yield the places of calls whose results leave the function; none is a view."""
    block = repeated.blocks[0]
    place = {node: i for i, node in enumerate(block)}
    for i in repeated.read:
        views = views_to(block[i], set(block))
        base = views[0].all_input_nodes[0] if views else block[i]
        if base in place:
            yield place[base]


def _body(
    blocks: tuple[Block, ...], results: list[int]
) -> tuple[fx.GraphModule, list[Row]]:
    """Build the function, and list what its operands are in every block."""
    graph = fx.Graph()
    inside = set(blocks[0])
    copies: dict[fx.Node, fx.Node] = {}
    operands: dict[Row, fx.Node] = {}
    constants: dict[Any, fx.Node] = {}

    def copy_of(row: Row) -> fx.Node:
        if row[0] in inside:
            return copies[row[0]]
        if _is_one_constant(row):
            key = signature(row[0])
            if key not in constants:
                constants[key] = _copied(graph, row[0], row[0].args, row[0].kwargs)
            return constants[key]
        return operands[row]

    for row in _outside(blocks):
        operands[row] = graph.placeholder(f"operand_{len(operands)}")
        operands[row].meta["val"] = row[0].meta["val"]
    for calls in zip(*blocks, strict=True):
        new = map(copy_of, zip(*map(operands_of, calls), strict=True))
        args, kwargs = fx.node.map_arg(arguments_of(calls[0]), _next_of(new))
        copies[calls[0]] = _copied(graph, calls[0], args, kwargs)
    for symbol in _unbound(graph, blocks[0][0].graph):
        row = (symbol,) * len(blocks)
        with graph.inserting_before(next(iter(graph.nodes))):
            operands[row] = graph.placeholder(f"operand_{len(operands)}")
        operands[row].meta["val"] = symbol.meta["val"]
    order = {x: i for i, x in enumerate(graph.find_nodes(op="placeholder"))}
    output = graph.output(tuple(copies[blocks[0][i]] for i in results))
    # Inductor keeps the strides of these.
    output.meta["user_visible_output_idxs"] = list(range(len(results)))
    graph.lint()
    rows = sorted(operands, key=lambda row: order[operands[row]])
    return fx.GraphModule({}, graph, "Block"), rows


def _unbound(body: fx.Graph, whole: fx.Graph) -> list[fx.Node]:
    """Return the sizes of `whole` whose symbols `body` uses, but its inputs lack."""
    inputs = body.find_nodes(op="placeholder")
    input_symbols = {x.meta["val"].node.expr for x in inputs if _is_number(x)}
    symbols: set[Any] = set()
    for node in body.nodes:
        symbols |= free_symbols(node.meta.get("val"))
    wanted = symbols - input_symbols
    numbers = {x.meta["val"].node.expr: x for x in whole.nodes if _is_number(x)}
    return [numbers[x] for x in sorted(wanted, key=str)]


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _next_of(nodes: Iterator[fx.Node]) -> Callable[[fx.Node], fx.Node]:
    return lambda _: next(nodes)


def _outside(blocks: tuple[Block, ...]) -> Iterator[Row]:
    """Return the operands from outside of the blocks; constants only if they differ."""
    inside = set(blocks[0])
    rows: dict[Row, None] = {}
    for calls in zip(*blocks, strict=True):
        for row in zip(*map(operands_of, calls), strict=True):
            if row[0] not in inside and not _is_one_constant(row):
                rows.setdefault(row)
    return iter(rows)


def _is_one_constant(row: Row) -> bool:
    return all(map(is_constant, row)) and len({signature(x) for x in row}) == 1


def _copied(graph: fx.Graph, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
    """Copy a call, with other operands."""
    assert callable(node.target), f"{node} is no call"
    new = graph.call_function(node.target, args, kwargs)
    new.meta = dict(node.meta)
    return new
