"""Find something narrower that the keys and values of a call are made of.

    latent = kv_norm(down(hidden))             [B, S, 576]
    k, v   = split(up(latent))                 [B, H, S, 192], [B, H, S, 128]

To send the latent and to compute k and v of all tokens on every rank may take less time
than to send these, and takes less memory. Which values to gather is a minimum cut of
the calls that make k and v token by token: bytes before it against work after it.

At most 64 calls are followed back. What is gathered has less than half of the bytes of
k and v. Never followed: random numbers, writes, attention, calls that move tokens.

Correctness does not depend on what is found here: whatever is gathered, all that
follows is computed on the whole sequence.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.cost.latents import LatentPrices, latent_prices
from cpcompile.cost.plans import Latents, Strategy

from ...flow.dim_rules import dim_map, product_map
from ...flow.flow import flows_of
from ...flow.token_sources import token_sources
from ...graph.attention_calls import is_attention
from ...graph.calls import canonical_call, spelled
from ...graph.context import AttentionCall, Context, InputKind, KeySources
from ...graph.effects import is_in_place, written_memory
from ...graph.graph_pass import graph_pass
from ...graph.nodes import (
    all_nodes,
    expected_shape,
    fake_mode_of,
    fake_value,
    storage,
    sub_graph,
)
from ...graph.sequence_tokens import SequenceDim, TokenDim
from ..attention.choose_strategy import workload
from ..layouts.layout_cut import LayoutCut
from .written_keys import join_written

FARTHEST = 64  # calls before an attention, beyond which nothing is narrow and near
NARROW = 0.5
"""Less of the bytes of keys and values than this is called narrower.

A model of costs does not see all that comes with computing again.
"""
_FORCED = (1.0, 0.1, 0.01, 0.0)
"""Shares of the work that count, one after another, if the user wants latents."""


@graph_pass(reads=("calls", "masks"), writes=("key_sources",))
def find_latents(graph: fx.Graph, ctx: Context) -> int:
    """Fill `findings.key_sources`; return of how many calls there are any."""
    if ctx.ranks == 1 or ctx.strategy not in (None, Strategy.LATENTS):
        return 0
    if any(x.kind is InputKind.OTHER_AXES for x in ctx.inputs.values()):
        return 0  # weights that tensor parallelism has split are not at hand
    for call in ctx.findings.calls:
        for x in (call.k, call.v):
            join_written(x)
    sources = _Sources(graph, ctx)
    for call in ctx.findings.calls:
        if call.unsupported is None and call.already_local is None:
            found = sources.of(call)
            if found is not None:
                ctx.findings.key_sources[call] = found
    return len(ctx.findings.key_sources)


@dataclass
class _Makers:
    """The calls that make the keys and values of a call, token by token.

    dims: their values, with the dimension that has the tokens.
    readers: of each value those of them that read it; the attention is one, too.
    written: memory to which calls write. What lies there can be read in its place only.
    """

    call: AttentionCall
    written: set[int | None]
    dims: dict[fx.Node, int] = field(default_factory=dict)
    readers: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)

    @cached_property
    def whole(self) -> float:
        """The bytes of k and v."""
        return sum(map(_bytes, (self.call.k, self.call.v)))

    def is_wide_before(
        self, node: fx.Node, sources: Iterable[tuple[fx.Node, int]]
    ) -> bool:
        """Tell whether a product has operands that are wide.

        What is wide before a product is hardly narrow again close before it.
        """
        return bool(_summed(node)) and any(
            _bytes(x) > NARROW * self.whole for x, _ in sources
        )

    def may_be_narrow(self) -> bool:
        """Tell whether any value is narrower than k and v are."""
        keys = [self.call.k, self.call.v]
        least = min(map(_bytes, keys))
        same = self.call.k is self.call.v
        tensors = [x for x in self.dims if isinstance(fake_value(x), Tensor)]
        return same or any(_bytes(x) < least for x in tensors if x not in keys)

    def form(self) -> Hashable:
        """Return what tells these calls from those of another layer that differs."""
        places = {node: i for i, node in enumerate(self.dims)}
        return (
            self.call.k is self.call.v,
            *(
                (
                    str(node.target) if node.op != "placeholder" else node.op,
                    dim,
                    tuple(places.get(x, -1) for x in self.readers[node]),
                    str(fake_value(node)),
                    _work(node),
                )
                for node, dim in self.dims.items()
            ),
        )

    def cheapest(self, prices: LatentPrices) -> set[fx.Node]:
        """Return the calls that are made for all tokens on every rank."""
        import networkx  # type: ignore[import-untyped]  # slow to import; has no types

        cut, tokens = LayoutCut(), self.call.k_shape[-2]
        cut.add(self.call.node, None, 0.0)
        made = {reader for x in self.readers.values() for reader in x}
        for node in self.dims:
            flops, moved = _work(node)
            seconds = (flops * prices.flop + moved * prices.moved) / tokens
            cut.add(node, 0.0, seconds if node in made else None)
            price = None
            if self.can_be_gathered(node):
                price = prices.value + _bytes(node) / tokens * prices.byte
            cut.feed(node, self.readers[node], (node, "value"), price)
        try:
            return self.dims.keys() & cut.solve()
        except networkx.NetworkXUnbounded:
            return set()  # something on the way can neither be gathered nor made again

    def can_be_gathered(self, node: fx.Node) -> bool:
        """Tell whether a value is one tensor, and the same wherever it is read."""
        return isinstance(fake_value(node), Tensor) and (
            storage(node) not in self.written
        )

    def narrow(self, chosen: set[fx.Node]) -> KeySources | None:
        """Return what is gathered for the chosen calls; None if it is not narrow."""
        tokens, reading = self.call.k_shape[-2], {*chosen, self.call.node}
        gathered = {
            node: dim
            for node, dim in self.dims.items()
            if node not in chosen and not reading.isdisjoint(self.readers[node])
        }
        size = sum(map(_bytes, gathered))
        work = [_work(x) for x in chosen]
        flops, moved = (math.fsum(x) for x in zip((0.0, 0.0), *work, strict=True))
        limit = NARROW * self.whole
        if size > limit or (size == limit and flops):
            return None
        if not all(map(self.can_be_gathered, gathered)):
            return None
        sizes = Latents(len(gathered), size / tokens, flops / tokens, moved / tokens)
        return KeySources(gathered, chosen, size / self.whole, sizes)


class _Sources:
    """The search in one graph and its checkpoint regions."""

    def __init__(self, graph: fx.Graph, ctx: Context) -> None:
        self.ctx = ctx
        self.flows = flows_of(fake_mode_of(graph), ctx.mesh.device_type)
        self.written = written_memory(graph)
        self.plain = _plain_values(graph, ctx)
        self.chosen: dict[Hashable, set[int]] = {}  # by form: places of the calls

    def of(self, call: AttentionCall) -> KeySources | None:
        """Return what to gather for a call; None if k and v themselves."""
        makers = self._makers(call)
        if makers is None or not makers.may_be_narrow():
            return None
        key, nodes = makers.form(), list(makers.dims)
        if key not in self.chosen:  # layers repeat
            made = self._chosen(makers)
            self.chosen[key] = {i for i, x in enumerate(nodes) if x in made}
        return makers.narrow({nodes[i] for i in self.chosen[key]})

    def _chosen(self, makers: _Makers) -> set[fx.Node]:
        """Return the calls that every rank is to make; none if k and v are sent."""
        call, ctx = makers.call, self.ctx
        prices = latent_prices(workload(call, ctx), ctx.profile)
        for share in _FORCED if ctx.strategy is Strategy.LATENTS else (1.0,):
            flop, moved = prices.flop * share, prices.moved * share
            chosen = makers.cheapest(replace(prices, flop=flop, moved=moved))
            if makers.narrow(chosen) is not None:
                return chosen
        return set()

    def _makers(self, call: AttentionCall) -> _Makers | None:
        """Return the calls that make k and v; None if tokens are in two dimensions."""
        makers = _Makers(call, self.written)
        waiting = deque(
            (x, fake_value(x).ndim - 2, call.node) for x in (call.k, call.v)
        )
        while waiting:
            node, dim, reader = waiting.popleft()
            makers.readers.setdefault(node, []).append(reader)
            if makers.dims.setdefault(node, dim) != dim:
                return None
            if len(makers.readers[node]) > 1 or len(makers.dims) > FARTHEST:
                continue
            if self.is_repeatable(node):
                sources = list(self._sources(node, dim, call.k_shape[-2]))
                if not makers.is_wide_before(node, sources):
                    waiting += [(source, at, node) for source, at in sources]
        return makers

    def is_repeatable(self, node: fx.Node) -> bool:
        """Tell whether a call has the same result when it is made once more."""
        if node.op not in ("call_function", "call_method"):
            return False
        if sub_graph(node) is not None or is_attention(node) or is_in_place(node):
            return False
        overload, table = canonical_call(node).overload, dim_map(node)
        seeded = torch.Tag.nondeterministic_seeded
        if spelled(node).endswith("dropout") or (
            overload is not None and seeded in overload.tags
        ):
            return False
        if table is not None and table.draws:
            return False
        operands = (node, *node.all_input_nodes)
        return not any(
            isinstance(fake_value(x), Tensor) and storage(x) in self.written
            for x in operands
        )

    def _sources(
        self, node: fx.Node, dim: int, tokens: int
    ) -> Iterator[tuple[fx.Node, int]]:
        """Yield the operands that have the tokens; none if that is not certain."""
        sequence, index = SequenceDim(TokenDim(dim), tokens), None
        if node.target is operator.getitem:
            source = node.args[0]
            if isinstance(source, fx.Node) and not isinstance(
                fake_value(source), Tensor
            ):
                yield source, dim  # one of several results
                return
        if not isinstance(fake_value(node), Tensor):
            index = 0
        found = list(token_sources(self.flows, node, sequence, index))
        if all(at.outer == 1 and _size(x, at.dim) == tokens for x, at in found):
            yield from ((x, at.dim) for x, at in found if x not in self.plain)


def _plain_values(graph: fx.Graph, ctx: Context) -> set[fx.Node]:
    """Return what is computed of integers and buffers: every rank has it anyway."""
    plain: set[fx.Node] = set()
    for node in all_nodes(graph):
        value = fake_value(node)
        if node.op == "placeholder":
            graph_input = ctx.inputs.get(node)
            given = graph_input is not None and graph_input.kind is InputKind.PLAIN
            is_plain = given or not _has_floats(value)
        else:
            is_plain = plain.issuperset(node.all_input_nodes)
        if is_plain:
            plain.add(node)
    return plain


def _has_floats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _work(node: fx.Node) -> tuple[float, float]:
    """Return the operations of a call, and the bytes that it reads and writes."""
    value, table = fake_value(node), dim_map(node)
    if not isinstance(value, Tensor) or (table is not None and table.is_view):
        return 0.0, 0.0
    if any(storage(x) == storage(node) for x in node.all_input_nodes):
        return 0.0, 0.0  # a view
    return 2.0 * _summed(node) * math.prod(expected_shape(value)), 2.0 * _bytes(node)


def _summed(node: fx.Node) -> int:
    """Return over how many products an entry of the result is a sum; 0 for others."""
    if spelled(node) == "linear":
        weight = canonical_call(node).arguments["weight"]
        return expected_shape(fake_value(weight))[-1]
    product = product_map(node)
    if product is None:
        return 0
    factor, labels = product.operands[0]
    sizes = dict(zip(labels, expected_shape(fake_value(factor)), strict=True))
    return math.prod(sizes[x] for x in labels if x not in product.result)


def _bytes(node: fx.Node) -> float:
    value = fake_value(node)
    size: int = value.element_size()
    return float(math.prod(expected_shape(value)) * size)


def _size(node: fx.Node, dim: int) -> int:
    value = fake_value(node)
    return expected_shape(value if isinstance(value, Tensor) else value[0])[dim]
