"""Put one call on rows in place of the calls of a region.

DTensor has no part in what happens between sorting tokens by their expert and bringing
them back: a rank sorts its own tokens, and the others do not matter.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch.fx as fx
from torch import Tensor

from ...graph.constant_arguments import GraphArgument, RegionCall
from ...graph.dispatch_calls import need
from ...graph.effects import is_in_place, written_by
from ...graph.nodes import fake_value, insert_call, storage
from .dispatch_region import DispatchRegion
from .region_module import row_module


def region_call(region: DispatchRegion, name: str) -> RegionCall:
    """Make the call for a region that has grown; nothing is changed.

    name: of what the region does.

    Raises: NotByRows if there is none.
    """
    graph = next(iter(region.moved)).graph
    nodes = list(graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    results = region.results()
    need(results)
    last = max(region.moved, key=place.__getitem__)
    for node in results:
        outside = [x for x in node.users if x not in region.moved]
        need(all(place[user] > place[last] for user in outside))
    inside = sorted((*region.moved, *region.copied), key=place.__getitem__)
    arguments = (*region.row_arguments, *region.same_arguments)
    between = nodes[place[inside[0]] : place[last]]
    need(not any(_writes(x, arguments) for x in between if x not in region.moved))
    module = row_module(region, list(results), place, region.flows.fake_mode)
    has_rows = tuple(x in region.row_arguments for x in arguments)
    not_counted = None
    if not any(results.values()):  # else the numbers would be sorted, too
        not_counted = _not_counted(region, arguments)
    of_rows = tuple(results.values())
    program = RowProgram(module, name, has_rows, of_rows, not_counted)
    return RegionCall(program, arguments, tuple(results), tuple(inside), last)


def _not_counted(
    region: DispatchRegion, arguments: tuple[fx.Node, ...]
) -> tuple[int | None, ...] | None:
    """Return the numbers of Region.not_counted, one for each argument."""
    numbers = region.not_counted()
    return None if numbers is None else tuple(map(numbers.get, arguments))


def write_region_call(region: RegionCall, like: fx.Node) -> list[fx.Node]:
    """Write the call of a region; return it and its parts, the results in order.

    Calls of the region that nobody reads any more are erased.
    """
    graph, values = like.graph, tuple(fake_value(x) for x in region.results)
    with graph.inserting_after(region.last):
        args = (region.program, *region.arguments)
        call = insert_call(graph, cp_row_parallel, args, like=like, value=values)
    written = [call]
    for index, node in enumerate(region.results):
        with graph.inserting_after(written[-1]):
            part = insert_call(
                graph, operator.getitem, (call, index), like=node, value=values[index]
            )
        written.append(part)
        node.replace_all_uses_with(
            part, delete_user_cb=lambda user: user not in region.inside
        )
    for node in reversed(region.inside):
        if not node.users:
            graph.erase_node(node)
    return written


def _writes(node: fx.Node, arguments: tuple[fx.Node, ...]) -> bool:
    """Tell whether a call writes into what the region reads."""
    if node.op not in ("call_function", "call_method") or not is_in_place(node):
        return False
    read = {storage(x) for x in arguments}
    return any(storage(x) in read for x in written_by(node))


@dataclass(frozen=True, repr=False, eq=False)
class RowProgram(GraphArgument):
    """A program that does the same with every row of some arguments.

    graph: graph(rows, *args) gives one tensor or several, for any number of rows.
    name: of what it does.
    arguments: which arguments have a row per token, along dimension 0; the others are
        the same for all tokens.
    results: which results have a row per token, in the order of their leaves; the
        others are sums over the tokens.
    not_counted: where all results are sums, for each argument a number that adds
        nothing to them, or None if its rows may have any number. None if it is not
        known.
    """

    name: str
    arguments: tuple[bool, ...]
    results: tuple[bool, ...]
    not_counted: tuple[int | None, ...] | None = None

    @property
    def label(self) -> str:  # type: ignore[override]
        return self.name

    def text(self) -> str:
        return f"{self.arguments} {self.results} {super().text()}"


def cp_row_parallel(program: RowProgram, *args: Tensor) -> Any:
    """Run a program on all rows; `localise` runs it on those of a rank."""
    of_rows = [x for x, has in zip(args, program.arguments, strict=True) if has]
    return program.run(of_rows[0].shape[0], *args)
