"""Give a number to every row that a boolean mask writes, so that sizes are known.

    setitem(x, mask, value)                          value [rows, C]
      ->
    numbers = cp.row_numbers(mask, rows, exact=True)
    write_rows_(x, mask, numbers, value)

torch finds where a mask is True by `nonzero`, whose size nobody knows in advance: the
compilers break the graph there, and DTensor has no rule. `masked_scatter` and
`index_put` do the same by other names. Rows that are read only to compute those that
are written, `x[mask] = x[mask] + value`, are not read:

    part = x[mask]; new = part + value; x[mask] = new
      ->
    numbers = ...; write_rows_(x, mask, numbers, value, accumulate=True)

The n-th True gets row n, a cumulative sum of the mask. Masks and numbers are the same
on every rank, and both are cut as x is, so that the call is the same for every token,
in every layout. Left alone: two masks, a mask beside tensors of positions.

Rows that are read only to be counted, `x[mask].shape[0]`, are counted in the mask,
which all ranks have: `mask[mask].shape[0]`.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.geometry.lengths import is_same
from cpcompile.torch_patches.tracing import plain_means_replicated
from cpcompile.torch_private import pytree
from cpcompile.torch_private.fake_tensors import enable_python_dispatcher

from ...graph.calls import canonical_call
from ...graph.context import Context
from ...graph.effects import is_in_place
from ...graph.graph_pass import graph_pass
from ...graph.nodes import all_graphs, fake_mode_of, fake_value, insert_call, where
from .masked_rows import write_rows, write_rows_

log = logging.getLogger(__name__)

_NUMBERS = torch.ops.cp.row_numbers.default


@graph_pass()
def number_rows(graph: fx.Graph, ctx: Context) -> int:
    """Give numbers to the rows of masked writes, also in checkpoint regions.

    Returns: the number of writes.
    """
    return sum(map(_rewrite, all_graphs(graph)))


@dataclass(frozen=True)
class MaskedIndex:
    """An index x[index] with one mask.

    basic: the index without the mask, for which x[basic] is a view; None if that is x.
    dim: the first dimension of the view that the mask is for.
    """

    mask: fx.Node
    basic: tuple[Any, ...] | None
    dim: int


@dataclass(frozen=True)
class MaskedWrite:
    """A write of rows where a mask is True.

    numbered: whether the value has more than one row.
    """

    base: fx.Node
    index: MaskedIndex
    value: Any
    numbered: bool
    exact: bool = True
    accumulate: bool = False
    in_place: bool = True


def masked_index(x: fx.Node, index: Any) -> MaskedIndex | None:
    """Read an index of `x` that has one mask and else only what gives a view.

    None for any other index.
    """
    value = fake_value(x)
    if not isinstance(value, Tensor):
        return None
    items = list(index) if isinstance(index, tuple) else [index]
    masks = [i for i, item in enumerate(items) if _is_mask(item)]
    if len(masks) != 1 or not all(
        _is_basic(item) for i, item in enumerate(items) if i not in masks
    ):
        return None
    mask = items[masks[0]]
    ndim = fake_value(mask).ndim
    used = ndim + sum(not (x is None or x is Ellipsis) for x in items) - 1
    if ndim == 0 or used > value.ndim:
        return None
    spread: list[Any] = []
    dim, taken = -1, 0
    for item in items:
        if item is mask:
            dim = sum(not isinstance(s, int | torch.SymInt | fx.Node) for s in spread)
            size = value.shape[taken : taken + ndim]
            if not all(map(is_same, size, fake_value(mask).shape)):
                return None
            spread += [slice(None)] * ndim
            taken += ndim
        elif item is Ellipsis:
            spread += [slice(None)] * (value.ndim - used)
            taken += value.ndim - used
        else:
            spread.append(item)
            taken += item is not None
    view = None if all(x == slice(None) for x in spread) else tuple(spread)
    return MaskedIndex(mask, view, dim)


def _is_mask(x: Any) -> bool:
    value = fake_value(x)
    return (
        isinstance(x, fx.Node)
        and isinstance(value, Tensor)
        and value.dtype == torch.bool
    )


def _is_basic(x: Any) -> bool:
    """Tell whether x, as an index, gives a view."""
    value = fake_value(x)
    if isinstance(x, slice):
        parts = [fake_value(part) for part in (x.start, x.stop, x.step)]
        return all(p is None or isinstance(p, int | torch.SymInt) for p in parts)
    if isinstance(value, bool):
        return False
    return value is None or value is Ellipsis or isinstance(value, int | torch.SymInt)


def masked_write(node: fx.Node) -> MaskedWrite | None:
    """Read a call that writes where a mask is True; None if it cannot be numbered."""
    call = canonical_call(node)
    arguments = call.arguments
    if call.name == "setitem":
        return _assignment(arguments["input"], arguments["index"], arguments["value"])
    if call.name in ("index_put", "index_put_"):
        indices = [slice(None) if x is None else x for x in arguments["indices"]]
        base, value = arguments["input"], arguments["values"]
        if fake_value(base).dtype != fake_value(value).dtype:
            return None
        adds, in_place = bool(arguments["accumulate"]), call.name.endswith("_")
        return _assignment(base, tuple(indices), value, adds, in_place)
    if call.name in ("masked_scatter", "masked_scatter_"):
        return _scatter(
            arguments["input"], arguments["mask"], arguments["source"], call.name
        )
    return None


def _assignment(
    base: Any, index: Any, value: Any, accumulate: bool = False, in_place: bool = True
) -> MaskedWrite | None:
    rows_value = fake_value(value)
    if not isinstance(base, fx.Node) or not isinstance(rows_value, Tensor):
        return None
    masked = masked_index(base, index)
    if masked is None or (masked.basic is not None and not in_place):
        return None
    shape = list(_view_shape(base, masked))
    ndim = fake_value(masked.mask).ndim
    del shape[masked.dim + 1 : masked.dim + ndim]
    if rows_value.ndim > len(shape):
        return None
    own = [None] * (len(shape) - rows_value.ndim) + list(rows_value.shape)
    rows = own[masked.dim]
    for dim, (size, n) in enumerate(zip(shape, own, strict=True)):
        fits = n is None or is_same(n, 1) or is_same(n, size)
        if dim != masked.dim and not fits:
            return None
    numbered = rows is not None and not is_same(rows, 1)
    return MaskedWrite(base, masked, value, numbered, True, accumulate, in_place)


def _view_shape(base: fx.Node, masked: MaskedIndex) -> Sequence[Any]:
    value = fake_value(base)
    if masked.basic is None:
        return tuple(value.shape)
    view = _value(base.graph, operator.getitem, (base, masked.basic))
    return tuple(view.shape)


def _scatter(base: Any, mask: Any, source: Any, name: str) -> MaskedWrite | None:
    """Read x.masked_scatter(mask, source), which takes source entries in order."""
    value, marks, entries = map(fake_value, (base, mask, source))
    if not _is_mask(mask) or entries.dtype != value.dtype or marks.ndim > value.ndim:
        return None
    shape = [1] * (value.ndim - marks.ndim) + list(marks.shape)
    pairs = zip(shape, value.shape, strict=True)
    if not value.ndim or not all(is_same(m, 1) or is_same(m, n) for m, n in pairs):
        return None
    index = MaskedIndex(mask, None, 0)
    in_place = name.endswith("_")
    return MaskedWrite(base, index, source, True, False, False, in_place)


def _rewrite(graph: fx.Graph) -> int:
    count = 0
    for node in list(graph.nodes):
        _count_in_mask(node)
        write = masked_write(node)
        if write is None:
            continue
        log.debug("%s: rows of %s are numbered", node.name, write.value)
        read, added = _added_to_read(node, write)
        _Numbered(graph, node).rewrite(added or write)
        if read is not None:
            _erase_unread(write.value, read, added is not None and added.numbered)
        count += 1
    return count


def _count_in_mask(node: fx.Node) -> None:
    """Read the mask in place of x[mask] if nothing but the number of rows is used."""
    call = canonical_call(node)
    if call.name != "getitem" or not isinstance(call.arguments["input"], fx.Node):
        return
    masked = masked_index(*call.arguments.values())
    size = torch.ops.aten.sym_size.int
    if masked is None or masked.basic is not None or masked.dim or not node.users:
        return
    if not all(x.target is size and x.args == (node, 0) for x in node.users):
        return
    rows, mask = fake_value(node), masked.mask
    with fake_mode_of(node.graph):
        counted = torch.empty(rows.shape[:1], dtype=torch.bool, device=rows.device)
    node.op, node.target, node.kwargs = "call_function", operator.getitem, {}
    node.args, node.meta["example_value"] = (mask, mask), counted


def _added_to_read(
    node: fx.Node, write: MaskedWrite
) -> tuple[fx.Node | None, MaskedWrite | None]:
    """Read `x[mask] = x[mask] + value`: what is read, and the write of the value.

    (None, None) for any other write.
    """
    total, nothing = write.value, (None, None)
    call = canonical_call(total)
    plain = call.name in ("add", "add_") and call.arguments.get("alpha", 1) == 1
    if not (plain and write.exact and write.in_place) or write.accumulate:
        return nothing
    if list(total.users) != [node]:
        return nothing
    terms = call.arguments["input"], call.arguments["other"]
    for read, other in (terms, terms[::-1]):
        if not isinstance(read, fx.Node) or canonical_call(read).name != "getitem":
            continue
        base, index = canonical_call(read).arguments.values()
        if base is not write.base or masked_index(base, index) != write.index:
            continue
        if call.name == "add_" and read is not terms[0]:
            continue  # another value is written, too
        added = _as_added(write, index, other)
        if added is not None and not _is_written_between(read, node, total):
            return read, added
    return nothing


def _as_added(write: MaskedWrite, index: Any, other: Any) -> MaskedWrite | None:
    value = fake_value(other)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return replace(write, value=other, numbered=False, accumulate=True)
    if isinstance(value, Tensor) and value.dtype == fake_value(write.base).dtype:
        return _assignment(write.base, index, other, accumulate=True)
    return None


def _is_written_between(first: fx.Node, last: fx.Node, but: fx.Node) -> bool:
    node = first.next
    while node is not last:
        if node is not but and node.op.startswith("call") and is_in_place(node):
            return True
        node = node.next
    return False


def _erase_unread(total: fx.Node, read: fx.Node, numbered: bool) -> None:
    """Erase a sum, and what it reads if all else that reads this is about its size.

    Whether there are as many True entries as rows is checked where rows are numbered.
    """
    graph = read.graph
    graph.erase_node(total)
    users: list[fx.Node] = [read]
    for node in users:
        users += [x for x in node.users if x not in users]
    about_size = [x for x in users if x is not read]
    if all(_is_about_size(x, numbered) for x in about_size):
        for node in reversed(users):
            graph.erase_node(node)


def _is_about_size(node: fx.Node, numbered: bool) -> bool:
    """Tell whether a node takes a size, compares it with a number, or asserts that."""
    if node.target is torch.ops.aten._assert_scalar.default:
        return True
    sizes = [torch.ops.aten.sym_size.int, operator.ge, operator.le]
    sizes += [operator.eq] if numbered else []
    return node.target in sizes and bool(node.users) and len(node.all_input_nodes) == 1


class _Numbered:
    """The rewrite of one write."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node

    def rewrite(self, write: MaskedWrite) -> None:
        """Put the calls that number and write the rows in the place of the node."""
        node, index = self.node, write.index
        base, mask, value = write.base, index.mask, write.value
        by_token = False
        with self.graph.inserting_before(node):
            if index.basic is not None:
                base = self._call(operator.getitem, base, index.basic)
            if not write.exact:
                mask, value, by_token = self._rows_of_scatter(base, mask, value)
            numbers = None
            if write.numbered:
                ndim = fake_value(mask).ndim
                row_ndim = fake_value(base).ndim - index.dim - ndim
                shape = fake_value(value).shape
                rows = self._size(value, len(shape) - row_ndim - 1)
                numbers = self._call(
                    _NUMBERS,
                    mask,
                    rows,
                    write.exact,
                    by_token,
                    where(node),
                )
            target = write_rows_ if write.in_place else write_rows
            args = (base, mask, numbers, value, index.dim, write.accumulate)
            value = fake_value(base if write.in_place else node)
            result = insert_call(self.graph, target, args, like=node, value=value)
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)

    def _rows_of_scatter(
        self, base: fx.Node, mask: fx.Node, source: fx.Node
    ) -> tuple[fx.Node, fx.Node, bool]:
        """Return the mask by rows, the source as rows, and whether to number by token.

        Numbers are by token if a row is one entry and there are over two dimensions.
        """
        shape = fake_value(base).shape
        marks = fake_value(mask)
        alike = [
            *[0] * (len(shape) - marks.ndim),  # dimensions that the mask has not
            *(
                0 if is_same(n, 1) else s
                for n, s in zip(marks.shape, marks.stride(), strict=True)
            ),
        ]
        ndim = len(shape)
        while ndim > 1 and alike[ndim - 1] == 0:
            ndim -= 1
        width = 1
        for size in shape[ndim:]:
            width *= size
        numel = fake_value(source).numel()
        if not is_same(numel % width, 0):
            ndim = len(shape)
        trailing = len(shape) - ndim
        if trailing and marks.ndim:
            first = min(trailing, marks.ndim)
            mask = self._call(operator.getitem, mask, (..., *[0] * first))
        if not fake_value(
            mask
        ).ndim:  # one mark for all: its rows are along a dimension
            mask = self._call(torch.reshape, mask, (1,) * ndim)
        own = fake_value(mask).shape
        if len(own) != ndim or not all(map(is_same, own, shape[:ndim])):
            mask = self._call(torch.Tensor.expand, mask, tuple(shape[:ndim]))
        rows = self._call(torch.reshape, source, (-1, *shape[ndim:]))
        return mask, rows, not trailing and ndim > 2

    def _size(self, x: fx.Node, dim: int) -> Any:
        size = fake_value(x).shape[dim]
        if isinstance(size, torch.SymInt):
            return self._call(torch.ops.aten.sym_size.int, x, dim)
        return size

    def _call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        value = _value(self.graph, target, args)
        return insert_call(self.graph, target, args, like=self.node, value=value)


def _value(graph: fx.Graph, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    values = fx.node.map_aggregate(args, fake_value)
    with (
        fake_mode_of(graph),
        enable_python_dispatcher(),
        torch.enable_grad(),
        plain_means_replicated(),
    ):
        if call is _NUMBERS:  # every rank has them all; DTensor knows nothing of them
            values = pytree.tree_map_only(DTensor, _whole, values)
        return call(*values)


def _whole(x: DTensor) -> Tensor:
    return x.to_local().new_empty(x.shape)
