"""Compute what mixes tokens in parts along another dimension.

    y = cumsum(k, 1)                         x: [B, S, H, D], split along S
      ->
    k = exchanged(k, 1, 2)                   split along H, with all tokens
    y = exchanged(cumsum(k, 1), 2, 1)        split along S again

A call that brings tokens together, such as a cumulative sum, a scan or a recurrence,
would run in full on every rank. Where it treats every entry of another dimension by
itself, ranks share these out: heads, channels, rows of a batch.

Note [Exchanged or not]
For one dimension, every call is on one of two sides: its values are split along the
tokens, or along that dimension. A value that a call of the other side reads costs an
all-to-all; a call that mixes tokens costs a gather and the work of all ranks on the
side of the tokens, and cannot be on the other side unless `flow` proves that entries
keep apart. The cheapest choice is a minimum cut, as for layouts.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from cpcompile.cost.mixer_plan import MixerPlan, MixerStrategy
from cpcompile.cost.relayout_cost import relayout_seconds
from cpcompile.geometry.layout import leaves_ranks_empty
from cpcompile.geometry.lengths import is_symbol
from cpcompile.logs import warn_once
from cpcompile.ops.mixers.mixer_work import forward_work, shapes_of
from cpcompile.ops.mixers.state_passing import passes_states

from ...flow.flow import flows_of
from ...graph.attention_calls import is_attention
from ...graph.calls import canonical_call, spelled
from ...graph.context import Context, InputKind
from ...graph.cp_attention import is_cp_attention
from ...graph.effects import is_in_place
from ...graph.graph_pass import graph_pass
from ...graph.mixer_calls import (
    is_mixer,
    mixed_in_parts,
    mixer_call,
    mixer_operands,
    result_roles,
)
from ...graph.nodes import (
    all_graphs,
    all_nodes,
    expected_shape,
    fake_mode_of,
    fake_value,
    insert_call,
    module_path,
    storage,
    sub_graph,
    where,
)
from ...graph.sequence_tokens import TokenDim, exchanged, is_row_parallel_operand
from ..layouts.layout_cut import LayoutCut
from ..normalize.pad_convolutions import convolved
from ..sharding.dim_flows import dim_flows, token_operands
from ..sharding.sharding_rules import RULES
from .dim_class import CREATIONS, DimClass, linked_values

_BYTES_OF_STATES = 4  # mixers compute in float32, whatever their operands are
_ANYWHERE = ("mean", "expand_as", "logsigmoid", "log_sigmoid")
"""Calls whose rules of ours look where their operand is split."""
_DEAR = 1e6  # seconds: a price for what the user has ruled out
_Prices = dict[MixerStrategy, float]


@graph_pass(writes=("mixers",))
def exchange_mixers(graph: fx.Graph, ctx: Context) -> int:
    """Exchange tokens for another dimension; return how many calls that is good for.

    A recurrence that can be computed in parts stays split along the tokens where
    passing on its state is cheaper; it counts, too.
    """
    if any(_is_of_data(fake_value(x)) for x in all_nodes(graph)):
        return 0
    seeds = dict(_sequences(graph, ctx))
    lengths = sorted({_size(node, dim) for node, dim in seeds.items()} - {0, 1})
    tokens = {}
    if len(lengths) > 1:
        tokens = {n: {*_Exchange(graph, ctx, n, seeds).tokens.dims} for n in lengths}
    count = 0
    for length in lengths:
        exchange = _Exchange(graph, ctx, length, seeds)
        exchange.of_others = set().union(*(tokens[n] for n in tokens if n != length))
        count += exchange.rewrite()
    return count


def _sequences(graph: fx.Graph, ctx: Context) -> Iterator[tuple[fx.Node, TokenDim]]:
    """Yield values whose tokens are known, with the dimension that has them."""
    for node, given in ctx.inputs.items():
        if given.kind is InputKind.FULL and given.dim is not None:
            yield node, TokenDim(given.dim)
        for axis, placement in enumerate(given.placements):
            if axis == ctx.axis and isinstance(placement, Shard):
                yield node, TokenDim(placement.dim)
    for node in all_nodes(graph):
        for operand, dim in token_operands(node):
            yield operand, TokenDim(dim)
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and is_mixer(source):
            tokens, _ = result_roles(source, node.args[1])  # type: ignore[arg-type]
            if tokens is not None:
                yield node, TokenDim(tokens)


def _is_of_data(value: Any) -> bool:
    """Tell whether only data tells a number, or a size of a tensor."""
    sizes = value.shape if isinstance(value, Tensor) else [value]
    return any(is_symbol(n) and bool(free_unbacked_symbols(n)) for n in sizes)


def _size(node: fx.Node, dim: TokenDim) -> int:
    return expected_shape(fake_value(node))[dim.dim]


@dataclass(frozen=True)
class _Region:
    """Calls that are computed in parts along another dimension than the tokens.

    saved: seconds, in comparison with the side of the tokens. first: where it begins.
    """

    entries: DimClass
    moved: set[fx.Node]
    saved: float
    first: int


class _Exchange:
    """The rewrite of a graph for sequences of one length."""

    def __init__(
        self, graph: fx.Graph, ctx: Context, tokens: int, seeds: dict[fx.Node, TokenDim]
    ) -> None:
        self.graph, self.ctx = graph, ctx
        self.nodes = [
            node
            for each in all_graphs(graph)
            for node in each.nodes
            if sub_graph(node) is None
        ]
        self.flows = flows_of(fake_mode_of(graph), ctx.mesh.device_type)
        self.links = linked_values(graph)
        self.tokens = DimClass(self.flows, self.links, tokens, 1)
        self.tokens.grow({x: d for x, d in seeds.items() if _size(x, d) == tokens})
        self.classes: list[DimClass] = []
        self.of_others: set[fx.Node] = set()  # what has tokens of another sequence
        self._written = _written_memory(self.nodes)
        self.computed = _computed_of(
            graph, {x for x in self.tokens.dims if x.op == "placeholder"}, self.links
        )

    def rewrite(self) -> int:
        mixers = [x for x in self.nodes if self._is_mixer(x)]
        # In an order that is the same on every rank, as all that follows.
        classes = dict.fromkeys(c for node in mixers for c in self._classes_of(node))
        regions = [x for c in classes for x in self._regions(c)]
        regions.sort(key=lambda x: (-x.saved, x.first))
        prices = {x: self._prices(x) for x in mixers if is_mixer(x)}
        written: set[fx.Node] = set()
        count = 0
        for region in regions:
            if written.isdisjoint(region.moved):
                written |= region.moved
                self._write(region)
                inside = [x for x in mixers if x in region.moved]
                count += len(inside)
                self._note(inside, region, prices)
        for node in mixers:
            if node in prices and node not in written:
                strategy = self._on_tokens(node)[1]
                if strategy is MixerStrategy.STATES:
                    node.target = mixed_in_parts
                    count += 1
                else:  # as it was priced; DTensor would choose anew
                    for operand in set(node.all_input_nodes):
                        dim = self.tokens.dims.get(operand)
                        if dim is not None and operand in self.computed:
                            self._insert(operand, [node], dim.dim, None)
                self._note_call(node, strategy, prices[node])
        return count

    def _note(
        self, mixers: list[fx.Node], region: _Region, prices: dict[fx.Node, _Prices]
    ) -> None:
        """Note what is computed in parts along another dimension, for people."""
        kept = [x for x in mixers if x in prices]
        for node in kept:
            dim = self._name_of(node, region.entries)
            self._note_call(node, MixerStrategy.EXCHANGE, prices[node], dim)
        if mixers and not kept:
            plan = MixerPlan(
                module_path(mixers[0]),
                spelled(mixers[0]),
                MixerStrategy.EXCHANGE,
                (),
                calls=len(mixers),
            )
            self.ctx.findings.mixers.append(plan)

    def _note_call(
        self, node: fx.Node, strategy: MixerStrategy, prices: _Prices, dim: str = ""
    ) -> None:
        name, forced = mixer_call(node).short_name, self.ctx.mixer_strategy is strategy
        path, seconds = module_path(node), tuple(prices.items())
        wanted = self.ctx.mixer_strategy
        if wanted not in (None, strategy):
            warn_once(
                f"{name} at {where(node)} is shared by {strategy.value!r}: "
                f'strategy {wanted.value!r} is not possible for it; "auto" chooses '
                "among those that are"
            )
        self.ctx.findings.mixers.append(
            MixerPlan(path, name, strategy, seconds, dim, forced=forced)
        )

    def _name_of(self, node: fx.Node, entries: DimClass) -> str:
        """Return what the table calls the dimension of a class."""
        for name, dims in mixer_call(node).mixer.independent.items():
            for operand, x in mixer_operands(node).items():
                if operand in dims and entries.dims.get(x) == TokenDim(dims[operand]):
                    return name
        return ""

    def _prices(self, node: fx.Node) -> _Prices:
        """Return the seconds of every strategy that is possible for a known mixer."""
        operands = [x for x in node.all_input_nodes if x in self.tokens.dims]
        in_full = self._gather_price(operands) + self._in_full(node)
        prices = {MixerStrategy.GATHER: in_full}
        states = self._states_price(node)
        if states is not None:
            prices[MixerStrategy.STATES] = states
        if any(True for _ in self._classes_of(node)):
            tensors = [*operands, *(x for x in node.users if x in self.tokens.dims)]
            ranks = self.ctx.ranks
            prices[MixerStrategy.EXCHANGE] = self._gather_price(tensors) / ranks
        return prices

    def _on_tokens(self, node: fx.Node) -> tuple[float, MixerStrategy]:
        """Return the seconds of a known mixer on the side of the tokens, and how."""
        prices = self._prices(node)
        prices.pop(MixerStrategy.EXCHANGE, None)
        forced = self.ctx.mixer_strategy
        if forced in prices:
            prices = {forced: prices[forced]}
        strategy = min(prices, key=lambda x: (prices[x], x.value))
        dear = forced is MixerStrategy.EXCHANGE
        return (_DEAR if dear else prices[strategy]), strategy

    def _states_price(self, node: fx.Node) -> float | None:
        """Return the seconds of passing on states; None where that is impossible."""
        call, operands = mixer_call(node), mixer_operands(node)
        state, ranks = call.mixer.state, self.ctx.ranks
        if state is None or not passes_states(call) or self.ctx.mesh.ndim > 1:
            return None
        if leaves_ranks_empty(self.tokens.entries, ranks):
            return None
        tokens = call.mixer.tokens
        if any(
            self.tokens.dims.get(x) != TokenDim(tokens[name])
            for name, x in operands.items()
            if name in tokens
        ):
            return None
        values = {name: fake_value(x) for name, x in operands.items()}
        shape = expected_shape(call.with_final_state().empty_state(values))
        part = math.prod(shape) * _BYTES_OF_STATES
        again, decay = 2.0, float(part)  # from zero, and from ones with values of zero
        if state.rows is not None and state.columns is not None:
            ratio = shape[state.rows] / shape[state.columns]
            again, decay = 1 + ratio, part * ratio
        passes = 2 if self.ctx.backward else 1
        gathered = relayout_seconds(self.ctx.profile, ranks, (part + decay) * ranks)
        return again * self._work(node) / ranks + passes * gathered

    def _is_mixer(self, node: fx.Node) -> bool:
        """Tell whether a call brings tokens together that ranks have."""
        if node.op not in ("call_function", "call_method") or sub_graph(node):
            return False
        if node not in self.computed or _knows_tokens(node):
            return False
        if spelled(node) in CREATIONS or convolved(node) is not None:
            return False  # what a convolution needs of neighbours is little
        if not any(x in self.tokens.dims for x in node.all_input_nodes):
            return False
        return not (self.tokens.is_local(node) or self.tokens.is_sum(node))

    def _classes_of(self, node: fx.Node) -> Iterator[DimClass]:
        """Yield the classes of dimensions that a call treats entry by entry."""
        for operand in node.all_input_nodes:
            if operand not in self.tokens.dims:
                continue
            for dim, size in enumerate(fake_value(operand).shape):
                if dim == self.tokens.dims[operand].dim or is_symbol(size):
                    continue  # a symbol may be less than the ranks another time
                if leaves_ranks_empty(size, self.ctx.ranks):
                    continue  # views of empty parts fail
                known = next(
                    (c for c in self.classes if c.dims.get(operand) == TokenDim(dim)),
                    None,
                )
                if known is None:
                    known = DimClass(self.flows, self.links, size, self.ctx.ranks)
                    known.grow({operand: TokenDim(dim)})
                    self.classes.append(known)
                if known.is_local(node):
                    yield known

    def _regions(self, entries: DimClass) -> Iterator[_Region]:
        """Yield the parts of the graph that are cheaper on the side of `entries`."""
        nodes = [x for x in self.nodes if self._takes_part(x, entries)]
        members = set(nodes)
        prices = {x: self._price(x, entries) for x in nodes}
        exchanges = {x: self._exchange_price(x, entries) for x in nodes}
        cut = LayoutCut()
        neighbours: dict[fx.Node, list[fx.Node]] = {x: [] for x in nodes}
        for node in nodes:
            cut.add(node, *prices[node])
            same = [x for x in self.links.get(node, ()) if x in members]
            users = [x for x in node.users if x in members]
            if spelled(node) == "setitem":
                same.append(node.args[0])
            elif not isinstance(fake_value(node), Tensor):
                same += users
            else:
                outside: list[Any] = []
                if _is_read_outside(node, members):
                    outside.append((node, "outside"))
                    cut.add(outside[0], 0.0, None)
                cut.feed(node, [*users, *outside], (node, "value"), exchanges[node])
            for other in same:
                cut.same(node, other)
            for other in (*same, *users):
                neighbours[node].append(other)
                neighbours[other].append(node)
        moved = {x for x in cut.solve() if isinstance(x, fx.Node)}
        order = {x: i for i, x in enumerate(nodes)}
        while moved:
            start = min(moved, key=order.__getitem__)
            region, waiting = set(), [start]
            while waiting:
                node = waiting.pop()
                if node in moved:
                    moved.remove(node)
                    region.add(node)
                    waiting += neighbours[node]
            around = {x for node in region for x in (node, *neighbours[node])}
            price = math.fsum(
                exchanges[x] or 0.0
                for x in around
                if any((user in region) != (x in region) for user in x.users)
            )
            saved = math.fsum(
                (prices[x][0] or 0.0) - (prices[x][1] or 0.0) for x in region
            )
            saved -= price
            if saved > 0:
                yield _Region(entries, region, saved, order[start])

    def _takes_part(self, node: fx.Node, entries: DimClass) -> bool:
        """Tell whether a call or input is on a side at all."""
        if node.op == "output" or node not in self.computed:
            return False
        values = (node, *node.all_input_nodes)
        return any(x in entries.dims for x in values)

    def _price(
        self, node: fx.Node, entries: DimClass
    ) -> tuple[float | None, float | None]:
        """Return the seconds of a call on either side; None where it must not be."""
        if node.op == "placeholder":
            return 0.0, (None if node not in self.links else 0.0)
        if self.is_written(node):
            return 0.0, None
        local = entries.is_local(node) or not self.computed.intersection(
            node.all_input_nodes
        )
        gathered = self._gathered(node, entries)
        local &= not any(self.is_written(x) for x in gathered)
        moved = 0.0 if local and not _stays(node) else None
        if moved is not None:
            width = entries.entries
            share = -(-width // self.ctx.ranks) / width
            moved = (share - 1 / self.ctx.ranks) * self._work(node)
            moved += self._gather_price(gathered)
        in_full = self._in_full(node)
        if not self._is_mixer(node):
            operands = self.computed.intersection(node.all_input_nodes)
            operands = {x for x in operands if isinstance(fake_value(x), Tensor)}
            if not operands or any(x in self.tokens.dims for x in operands):
                return 0.0, moved
            if dim_flows(node):  # cut again where it is shorter, and gathered again
                in_full += self._gather_price(operands)
            return in_full, moved
        forced = self.ctx.mixer_strategy
        rules_out = forced is MixerStrategy.GATHER or (
            forced is MixerStrategy.STATES
            and is_mixer(node)
            and self._states_price(node) is not None
        )
        if rules_out and moved is not None:
            moved = _DEAR
        if is_mixer(node):
            return self._on_tokens(node)[0], moved
        with_tokens = [x for x in node.all_input_nodes if x in self.tokens.dims]
        in_parts = self._gather_price(with_tokens) + in_full
        return _DEAR if forced is MixerStrategy.EXCHANGE else in_parts, moved

    def _in_full(self, node: fx.Node) -> float:
        """Return the seconds of a call on every rank, beyond those of a share."""
        return (1 - 1 / self.ctx.ranks) * self._work(node)

    def _gathered(self, node: fx.Node, entries: DimClass) -> list[fx.Node]:
        """Return the operands that ranks must have in whole on the side of `entries`.

        All of its entries read them, and they are split along the tokens.
        """
        if spelled(node) in CREATIONS:
            return []
        return [
            x
            for x in node.all_input_nodes
            if x in self.tokens.dims and x in self.computed and x not in entries.dims
        ]

    def is_written(self, node: fx.Node) -> bool:
        """Tell whether a call writes to the memory of a value, or of an operand."""
        values = (node, *node.all_input_nodes) if is_in_place(node) else (node,)
        return any(storage(x) in self._written for x in values)

    def _gather_price(self, operands: Iterable[fx.Node]) -> float:
        """Return the seconds to gather values, and their gradients."""
        ranks = self.ctx.ranks
        return math.fsum(  # the same on every rank, in whatever order
            (2 if self.ctx.backward else 1)
            * relayout_seconds(self.ctx.profile, ranks, _bytes(x))
            for x in operands
        )

    def _work(self, node: fx.Node) -> float:
        """Return the seconds of a call in full.

        Its memory is read and written once; of a mixer that is kept whole we know more.
        """
        profile = self.ctx.profile
        if is_mixer(node):
            operands = [fake_value(x) for x in mixer_operands(node).values()]
            work = forward_work(str(mixer_call(node)), shapes_of(operands))
            rate = profile.forward_flops_per_second * profile.speed(_BYTES_OF_STATES)
            passes = 4 if self.ctx.backward else 1  # the backward computes it again
            return passes * (
                work.flops / rate + work.bytes / profile.memory_bytes_per_second
            )
        sizes = map(_bytes, (node, *node.all_input_nodes))
        passes = 3 if self.ctx.backward else 1
        return passes * sum(sizes) / profile.memory_bytes_per_second

    def _exchange_price(self, node: fx.Node, entries: DimClass) -> float | None:
        """Return the seconds to exchange a value; None if it cannot be exchanged."""
        token_dim, dim = self.tokens.dims.get(node), entries.dims.get(node)
        if token_dim is None and node in self.of_others:
            return None
        if dim is not None and token_dim is None and dim.outer == 1:
            return self._gather_price([node])  # as a last state, which has no tokens
        if token_dim is None or dim is None or token_dim.dim == dim.dim:
            return None
        if token_dim.outer > 1 or dim.outer > 1 or self.is_written(node):
            return None
        value = fake_value(node)
        if _size(node, token_dim) != self.tokens.entries:
            return None
        if _size(node, dim) != entries.entries and entries.entries % self.ctx.ranks:
            return None  # a rank's part would begin inside of an entry
        passes = 2 if self.ctx.backward and value.requires_grad else 1
        ranks = self.ctx.ranks
        return passes * relayout_seconds(self.ctx.profile, ranks, _bytes(node) / ranks)

    def _write(self, region: _Region) -> None:
        """Write the exchanges around a region."""
        moved, entries = region.moved, region.entries
        around = {x for node in moved for x in (node, *node.all_input_nodes)}
        for node in sorted(around):
            dim, token_dim = entries.dims.get(node), self.tokens.dims.get(node)
            if not isinstance(fake_value(node), Tensor):
                continue
            if dim is None:
                if token_dim is not None and node in self.computed:
                    readers = [x for x in node.users if x in moved]
                    self._insert(node, readers, token_dim.dim, None)
                continue
            if node in moved and _is_whole(node, moved):
                self._insert(node, list(node.users), dim.dim, dim.dim)
            if node not in self.computed:
                continue
            if node in moved:
                others = [x for x in node.users if x not in moved]
                target = None if token_dim is None else token_dim.dim
                self._insert(node, others, dim.dim, target)
            elif token_dim is not None:
                others = [x for x in node.users if x in moved]
                self._insert(node, others, token_dim.dim, dim.dim)

    def _insert(
        self, node: fx.Node, users: list[fx.Node], source: int, target: int | None
    ) -> None:
        """Let users read a value that is split along `target` in place of `source`.

        With None they read all of it.
        """
        users = [x for x in users if sub_graph(x) is None and not _reads_no_value(x)]
        if not users:
            return
        last = node
        if node.op == "placeholder":
            last = node.graph.find_nodes(op="placeholder")[-1]
        args, value = (node, source, target), fake_value(node)
        with node.graph.inserting_after(last):
            new = insert_call(node.graph, exchanged, args, like=node, value=value)
        for each in (self.tokens, *self.classes):
            if node in each.dims:
                each.dims[new] = each.dims[node]
        self.computed.add(new)
        for user in users:
            user.replace_input_with(node, new)


def _written_memory(nodes: Iterable[fx.Node]) -> set[int | None]:
    """Return the memory that calls write to, but for that of new tensors.

    Whatever names such memory has to lie in it as the caller knows it.
    """
    written = {
        storage(node.args[0])
        for node in nodes
        if is_in_place(node)
        and isinstance(node.args[0], fx.Node)
        and not (spelled(node) == "setitem" and spelled(node.args[0]) in CREATIONS)
    }
    return written - {None}


def _reads_no_value(node: fx.Node) -> bool:
    """Tell whether a call needs no more of its operands than their dtype."""
    return spelled(node) in CREATIONS and not spelled(node).endswith("_like")


def _is_whole(node: fx.Node, moved: set[fx.Node]) -> bool:
    """Tell whether every rank makes all of a new tensor."""
    name = spelled(node)
    like = name.endswith("_like") and moved.issuperset(node.all_input_nodes)
    return name in CREATIONS and not like


def _is_read_outside(node: fx.Node, members: set[fx.Node]) -> bool:
    """Tell whether a call that has no side reads a value, or it leaves the graph."""
    return any(
        user not in members
        and spelled(user) not in CREATIONS
        and (user.op == "output" or isinstance(fake_value(user), Tensor))
        for user in node.users
    )


def _knows_tokens(node: fx.Node) -> bool:
    """Tell whether a rule of ours splits a call along tokens, whatever flow says."""
    if is_attention(node) or is_cp_attention(node) or is_row_parallel_operand(node):
        return True
    name = canonical_call(node).name
    return name in RULES and name not in ("view", "reshape", "flatten", "cat")


def _stays(node: fx.Node) -> bool:
    """Tell whether a call has to be on the side of the tokens, whatever flow says."""
    return _knows_tokens(node) and canonical_call(node).name not in _ANYWHERE


def _bytes(node: fx.Node) -> float:
    value = fake_value(node)
    if not isinstance(value, Tensor):
        return 0.0
    return math.prod(expected_shape(value)) * value.element_size()


def _computed_of(
    graph: fx.Graph, inputs: set[fx.Node], links: dict[fx.Node, list[fx.Node]]
) -> set[fx.Node]:
    """Return what is computed of some inputs, and these."""
    found, waiting = set(inputs), list(inputs)
    while waiting:
        node = waiting.pop()
        read = [x for x in node.users if spelled(x) not in CREATIONS]
        written = [x.args[0] for x in read if spelled(x) == "setitem"]
        for other in (*read, *written, *links.get(node, ())):
            if not isinstance(other, fx.Node) or other.op == "output":
                continue
            if other not in found:
                found.add(other)
                waiting.append(other)
    return found
