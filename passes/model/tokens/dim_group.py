"""Follow one dimension through a graph, as far as its entries keep apart.

    h = linear(x)              [B, S, H * D]    entries are a part of dimension 2
    q = h.view(B, S, H, D)     [B, S, H, D]     dimension 2
    y = cumsum(q, 1)           [B, S, H, D]     dimension 2
    linear(y.flatten(2))       a sum over the entries: the class ends here

A class is what one dimension of one value leads to, forward and backward, by `flow`.
In all of it a rank can compute its own entries alone.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ...flow.dim_maps import SUM
from ...flow.dim_rules import dim_map, kept_dims
from ...flow.flow import Flows
from ...flow.shaped_calls import shaped_call
from ...flow.token_sources import token_sources
from ...graph.calls import NEW_TENSORS, spelled
from ...graph.mixer_calls import independent_dims, is_mixer
from ...graph.nodes import expected_shape, fake_value, sub_graph
from ...graph.sequence_tokens import SequenceDim, TokenAxis, TokenDim, Wanted, wanted_of
from .convolutions import convolved, independent_channels
from .dim_flows import part_written

CREATIONS = (*NEW_TENSORS, "arange", "size")
"""Calls that read no value of their operands, but their shape, dtype or device."""
_WHOLE = (Wanted.ALL_ROWS, Wanted.KEY_SOURCE)  # every rank has all of these


class DimGroup:
    """The values of a graph and its checkpoint regions that have the same entries.

    dims: by value, the dimension that has them. whole: values that ranks have in whole,
    whatever flows into them.
    """

    def __init__(
        self,
        flows: Flows,
        links: Mapping[fx.Node, list[fx.Node]],
        entries: int,
        ranks: int,
        whole: Iterable[fx.Node] = (),
    ) -> None:
        self.flows, self.links = flows, links
        self.entries, self.ranks = entries, ranks
        self.dims: dict[fx.Node, TokenDim] = {}
        self._torn = set(whole)
        self._waiting: list[fx.Node] = []

    def grow(self, seeds: Mapping[fx.Node, TokenDim]) -> None:
        """Follow these dimensions as far as they go."""
        for node, dim in seeds.items():
            self._add(node, dim)
        while self._waiting:
            node = self._waiting.pop()
            if node not in self.dims:
                continue
            dim = self.dims[node]
            for other in self.links.get(node, ()):
                self._add(other, dim)
            for operand, at in self._before(node, dim):
                self._add(operand, at)
            for part, at in _assigned(node, dim):
                self._add(part, at)
            for user in node.users:
                self._after(user)

    def is_local(self, node: fx.Node) -> bool:
        """Tell whether a rank can make this call on its own entries alone."""
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and not isinstance(fake_value(source), Tensor):
            return node in self.dims and self.is_local(source)
        if spelled(node) in CREATIONS:
            return node in self.dims
        if not any(x in self.dims for x in node.all_input_nodes):
            return False
        if spelled(node) == "setitem":
            return self._assigns(node)
        found = self._flow(node)
        if found is None:
            return False
        results, others = found
        if any(self.dims.get(x) != at for x, at in others.items()):
            return False
        if results is None:
            return False
        if any(self.dims.get(x) != results[i] for i, x in _values_of(node)):
            return False
        return self.entries % self.ranks == 0 or self._is_local_in_parts(node)

    def _is_local_in_parts(self, node: fx.Node) -> bool:
        """Tell whether DTensor makes a call on uneven parts as on single entries."""
        operands = convolved(node)
        if operands is not None:  # channels by a rule of ours, which rows have not
            channels = independent_channels(node, self.entries) or {}
            return self.dims[operands[0]] == TokenDim(channels.get(operands[0], -1))
        if spelled(node) in ("view", "reshape", "flatten", "unflatten"):
            return False  # DTensor takes them for views of the uneven dimension, too
        call, leaves = shaped_call(node)
        roles = [self.dims.get(x) if isinstance(x, fx.Node) else None for x in leaves]
        flow = self.flows.of(call, roles, self.entries, self.ranks)
        if flow is None or flow.ends_sums or flow.draws:
            return False
        return all(
            x is not None and x.role == self.dims[value]
            for i, value in _values_of(node)
            for x in [flow.results[i]]
        )

    def is_sum(self, node: fx.Node) -> bool:
        """Tell whether a call gives a sum over the entries."""
        found = self._flow(node)
        return found is not None and found[0] is None

    def consumers_of(self, node: fx.Node) -> dict[fx.Node, TokenDim] | None:
        """Return where the entries are in the values that a call makes.

        That is nowhere in a sum over them. None where entries meet.
        """
        found = self._flow(node)
        if found is None:
            return None
        results, _ = found
        return {} if results is None else {x: results[i] for i, x in _values_of(node)}

    def size(self, node: fx.Node) -> int:
        """Return the size of the dimension that has the entries."""
        return expected_shape(fake_value(node))[self.dims[node].dim]

    def _add(self, node: fx.Node, dim: TokenDim) -> None:
        if node in self._torn or self.dims.get(node) == dim:
            return
        if node in self.dims:  # two of its dimensions: nobody can follow both
            self._torn.add(node)
            del self.dims[node]
            return
        shape = expected_shape(fake_value(node))
        if dim.dim < len(shape) and shape[dim.dim] % (dim.outer * self.entries) == 0:
            self.dims[node] = dim
            self._waiting.append(node)

    def _before(
        self, node: fx.Node, dim: TokenDim
    ) -> Iterator[tuple[fx.Node, TokenDim]]:
        if node.op not in ("call_function", "call_method"):
            return
        if wanted_of(node) in _WHOLE:
            return
        sequence, index = SequenceDim(dim, self.entries), None
        if node.target is operator.getitem:
            arguments: tuple[Any, ...] = node.args
            source, item = arguments
            if not isinstance(fake_value(source), Tensor):
                if sub_graph(source) is not None or not isinstance(item, int):
                    return
                node, index = source, item
        elif sub_graph(node) is not None:
            return
        apart = self._apart(node)
        if apart is not None:
            for operands, results in apart:
                if results[index or 0] == dim:
                    yield from operands.items()
            return
        yield from token_sources(self.flows, node, sequence, index)

    def _apart(
        self, node: fx.Node
    ) -> Iterable[tuple[dict[fx.Node, TokenDim], dict[int, TokenDim]]] | None:
        """Return the dimensions that a mixer or convolution treats entry by entry.

        None for other calls, of which DTensor knows more than we do.
        """
        if is_mixer(node):
            return self._of_mixer(node)
        operands = convolved(node)
        return None if operands is None else self._of_convolution(node, *operands)

    def _of_convolution(
        self, node: fx.Node, x: fx.Node, weight: fx.Node
    ) -> Iterator[tuple[dict[fx.Node, TokenDim], dict[int, TokenDim]]]:
        if fake_value(x).ndim == fake_value(weight).ndim:
            yield {x: TokenDim(0)}, {0: TokenDim(0)}  # rows of a batch
        channels = independent_channels(node, self.entries)
        if channels is not None:
            operands = {y: TokenDim(dim) for y, dim in channels.items()}
            yield operands, {0: operands[x]}

    def _of_mixer(
        self, node: fx.Node
    ) -> Iterator[tuple[dict[fx.Node, TokenDim], dict[int, TokenDim]]]:
        """Yield where each dimension is that a mixer treats entry by entry.

        That is in operands, and in results by their number. DTensor's rule would tell
        the same from the same table, for one combination of operands after the other.
        """
        for operands, results in independent_dims(node):
            sizes = {expected_shape(fake_value(x))[dim] for x, dim in operands.items()}
            if len(sizes) == 1 or all(n % self.entries == 0 for n in sizes):
                yield (
                    {x: TokenDim(dim) for x, dim in operands.items()},
                    {i: TokenDim(dim) for i, dim in results.items()},
                )

    def _after(self, user: fx.Node) -> None:
        if user.op == "output" or sub_graph(user) is not None:
            return
        if wanted_of(user) in _WHOLE:
            return
        if spelled(user) in CREATIONS:
            return
        if spelled(user) == "setitem":
            for flow in part_written(user):
                if self.dims.get(flow.source) == TokenDim(flow.dim):
                    self._add(user.args[0], TokenDim(flow.out))  # type: ignore[arg-type]
            return
        if user.target is operator.getitem and not isinstance(
            fake_value(user.args[0]), Tensor
        ):
            return  # its values got their dimension from the call
        found = self._flow(user)
        if found is None:
            return
        results, operands = found
        for operand, at in operands.items():
            self._add(operand, at)
        if results is not None and user not in self._torn:
            for i, value in _values_of(user):
                self._add(value, results[i])

    def _flow(
        self, node: fx.Node
    ) -> tuple[dict[int, TokenDim] | None, dict[fx.Node, TokenDim]] | None:
        """Return the dimensions of results, by their number, and those of operands.

        None where entries meet or nothing is known; a sum has no dimensions.
        """
        own = {x: self.dims[x] for x in node.all_input_nodes if x in self.dims}
        apart = self._apart(node)
        if apart is not None:
            return next(
                (
                    (results, operands)
                    for operands, results in apart
                    if own and own.items() <= operands.items()
                ),
                None,
            )
        table = dim_map(node)
        if table is not None and not table.draws:
            axes = {x: self._axis(x) for x in own}
            found = table.after(node, axes, self.entries)
            if found is not None:
                at, operands = found
                dims = {x: TokenDim(a.dim, a.outer) for x, a in operands.items()}
                if at is SUM:
                    return None, dims
                assert isinstance(at, TokenAxis)
                result = TokenDim(at.dim, at.outer)  # of each, as of chunk
                return {i: result for i, _ in _values_of(node)}, dims
            if table.is_view:
                return None
        call, leaves = shaped_call(node)
        roles = [self.dims.get(x) if isinstance(x, fx.Node) else None for x in leaves]
        flow = self.flows.of(call, roles, self.entries)
        if flow is None or flow.ends_sums or flow.draws or not flow.tensors:
            return None
        cut = {leaves[i]: dim for i, dim in flow.cut.items()}
        found_dims = {
            i: x.role
            for i, x in enumerate(flow.results)
            if x is not None and isinstance(x.role, TokenDim)
        }
        if len(found_dims) == len(flow.tensors):
            return found_dims, own | cut
        if all(x.is_sum for x in flow.tensors):
            return None, own | cut
        return None

    def _assigns(self, node: fx.Node) -> bool:
        """Tell whether each entry of a tensor is assigned its own entry of another."""
        base, index, part = node.args
        dim = self.dims.get(base)  # type: ignore[arg-type]
        if dim is None or dim.outer > 1:
            return False
        own = {x.out: (x.source, x.dim) for x in part_written(node)}
        if dim.dim in own:
            source, at = own[dim.dim]
            return self.dims.get(source) == TokenDim(at)
        # The same number for all entries: the index must take all of them.
        return part not in self.dims and _takes_all(base, index, dim.dim)

    def _axis(self, node: fx.Node) -> TokenAxis:
        dim = self.dims[node]
        return TokenAxis(
            dim.dim, dim.outer, self.size(node) // dim.outer // self.entries
        )


def _assigned(base: fx.Node, dim: TokenDim) -> list[tuple[fx.Node, TokenDim]]:
    """Return what is assigned to parts of a tensor, with the dimension of entries."""
    return [
        (flow.source, TokenDim(flow.dim))
        for user in base.users
        if user.args[:1] == (base,) and dim.outer == 1
        for flow in part_written(user)
        if flow.out == dim.dim
    ]


def _takes_all(base: Any, index: Any, dim: int) -> bool:
    shape = expected_shape(fake_value(base))
    dims = dict(kept_dims(index, len(shape)) or ())
    if dim not in dims:
        return False
    taken = torch.empty(shape, device="meta")[index]
    return bool(taken.shape[dims[dim]] == shape[dim])


def _values_of(node: fx.Node) -> list[tuple[int, fx.Node]]:
    """Return the tensors that a call makes: itself, or the items of its results."""
    if isinstance(fake_value(node), Tensor):
        return [(0, node)]
    return [
        (user.args[1], user)  # type: ignore[misc]
        for user in node.users
        if user.target is operator.getitem and isinstance(fake_value(user), Tensor)
    ]


def linked_values(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return the nodes that stand for one value inside and outside of regions."""
    links: dict[fx.Node, list[fx.Node]] = {}

    def link(one: object, other: fx.Node) -> None:
        if isinstance(one, fx.Node):
            links.setdefault(one, []).append(other)
            links.setdefault(other, []).append(one)

    def walk(graph: fx.Graph) -> None:
        for node in graph.nodes:
            region = sub_graph(node)
            if region is None:
                continue
            inner = region.graph.find_nodes(op="placeholder")
            for placeholder, argument in zip(inner, node.args[1:], strict=True):
                link(argument, placeholder)
            (results,) = region.graph.output_node().args
            for user in node.users:
                if user.target is operator.getitem:
                    link(results[user.args[1]], user)  # type: ignore[index]
            walk(region.graph)

    walk(graph)
    return links
