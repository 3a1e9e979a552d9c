"""Compute what mixes tokens in parts along another dimension.

    y = cumsum(k, 1)                         x: [B, S, H, D], split along S
      ->
    k = constraint(k, EXCHANGED, 1, 2)               split along H, with all tokens
    y = constraint(cumsum(k, 1), EXCHANGED, 2, 1)    split along S again

A call that brings tokens together, such as a cumulative sum, a scan or a recurrence,
would run in full on every rank. Where it treats every entry of another dimension by
itself, ranks share these out: heads, channels, rows of a batch. Which calls, is a
minimum cut (Note [Exchanged or not]). A dimension has a part for every rank; what all
entries read is gathered if that is cheap. A recurrence with an affine state may stay
split along the tokens and pass on its states instead, which the cut compares.

`constraint` only says where values lie: `localise` makes it an all-to-all, and DTensor
decides on every call in between, so that a wrong class costs time, never a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.fx as fx
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from cpcompile.cost.mixer_plan import MixerPlan, MixerStrategy
from cpcompile.geometry.lengths import is_symbol
from cpcompile.logs import warn_unmet
from cpcompile.torch_private import pytree

from ...graph.calls import spelled
from ...graph.context import Context
from ...graph.graph_pass import graph_pass
from ...graph.mixer_calls import is_mixer, mixed_in_parts, mixer_call, mixer_operands
from ...graph.nodes import (
    all_nodes,
    fake_value,
    insert_call,
    module_path,
    storage,
    sub_graph,
    where,
)
from ...graph.sequence_tokens import TokenDim, Wanted, constraint, wanted_of
from ...placement.scan_calls import cp_scan, scanned_in_parts
from ..tokens.dim_group import CREATIONS, DimGroup
from ..tokens.mixed_sequence import (
    MixedSequence,
    dim_size,
    find_sequences,
    moves_little,
)
from .keys_of_pairs import mark_keys, products_of_pairs
from .mixer_regions import Region, RegionFinder
from .mixer_seconds import MixerSeconds, Seconds, has_strategies

_MOST_LENGTHS = 8
"""A loop over parts of a sequence may have as many lengths as it has steps."""
_VIEWS = ("view", "reshape", "flatten", "unflatten", "view_as")
"""Calls that compute nothing: what they need of other ranks is in the account."""


@graph_pass(reads=("calls", "balanced_plans"), writes=("mixers",))
def exchange_mixers(graph: fx.Graph, ctx: Context) -> int:
    """Exchange tokens for another dimension; return how many calls that is good for.

    A recurrence that can be computed in parts stays split along the tokens where
    passing on its state is cheaper; it counts, too. Products of all pairs of tokens are
    no mixers: their keys are marked (keys_of_pairs).
    """
    products = dict(products_of_pairs(graph))
    is_of_data = any(_is_of_data(fake_value(x)) for x in all_nodes(graph))
    if is_of_data and not products:
        return 0
    seeds = dict(find_sequences(graph, ctx))
    lengths = sorted({dim_size(*x) for x in seeds.items()} - {0, 1})
    found: dict[int, tuple[MixedSequence, int]] = {}

    def seeds_of(length: int) -> int:
        return sum(dim_size(*x) == length for x in seeds.items())

    def follow(length: int) -> MixedSequence:
        if length not in found:
            sequence = MixedSequence(graph, ctx, length, seeds)
            found[length] = sequence, seeds_of(length)
        return found[length][0]

    marked = mark_keys(products, [*map(follow, lengths)]) if products else 0
    if is_of_data:
        return marked
    if marked:  # what was followed is not what it was, and marks say more
        seeds, found = dict(find_sequences(graph, ctx)), {}
        lengths = sorted({dim_size(*x) for x in seeds.items()} - {0, 1})
    for length in lengths:  # and those that are found on the way
        sequence = follow(length)
        for node, dim in sequence.moved_results():
            seeds.setdefault(node, dim)
            if dim_size(node, dim) not in lengths and len(lengths) < _MOST_LENGTHS:
                lengths.append(dim_size(node, dim))
    tokens = {length: x.tokens for length, (x, _) in found.items()}
    count, moved = 0, set[fx.Node]()
    for length in lengths:
        sequence, known = found[length]
        if count or known < seeds_of(length):  # it is not what it was
            sequence = MixedSequence(graph, ctx, length, seeds, moved)
        sequence.others = [x for n, x in tokens.items() if n != length]
        rewrite = _Exchange(sequence, ctx)
        count += rewrite.rewrite()
        moved |= rewrite.exchanged
    return marked + count


def _is_of_data(value: Any) -> bool:
    """Tell whether only data tells a number, or a size of a tensor."""
    sizes = value.shape if isinstance(value, Tensor) else [value]
    return any(is_symbol(n) and bool(free_unbacked_symbols(n)) for n in sizes)


class _Exchange:
    """The rewrite of a graph for sequences of one length.

    exchanged: values that are split along another dimension afterwards.
    """

    def __init__(self, sequence: MixedSequence, ctx: Context) -> None:
        self.sequence, self.ctx = sequence, ctx
        self.exchanged: set[fx.Node] = set()
        self.seconds = MixerSeconds(sequence, ctx)

    def rewrite(self) -> int:
        """Write all regions; return how many calls are shared out."""
        mixers = [x for x in self.sequence.nodes if self.sequence.mixes(x)]
        if not self.sequence.is_given and all(map(moves_little, mixers)):
            return 0  # as rows of an image are merged, which needs no message
        # In an order that is the same on every rank, as all that follows.
        classes = dict.fromkeys(
            entries for node in mixers for entries in self.sequence.classes_of(node)
        )
        finder = RegionFinder(self.sequence, self.seconds)
        regions = [x for c in classes for x in finder.find(c)]
        regions.sort(key=lambda x: (-x.saved, x.first))
        prices = {x: self.seconds.of_strategies(x) for x in mixers if has_strategies(x)}
        written: set[fx.Node] = set()
        count = 0
        for region in regions:
            if written.isdisjoint(region.moved):
                written |= region.moved
                self._write(region)
                self.exchanged |= region.moved
                self.exchanged |= {
                    x
                    for node in region.moved
                    for x in node.all_input_nodes
                    if wanted_of(x) is Wanted.EXCHANGED
                }
                inside = [x for x in mixers if x in region.moved]
                count += len(inside)
                self._note(inside, region, prices)
        gathered: dict[str, list[fx.Node]] = {}
        for node in mixers:
            if node in written:
                continue
            if node in prices:
                strategy = self.seconds.strategy(node)
                if strategy is MixerStrategy.STATES:
                    node.target = mixed_in_parts if is_mixer(node) else scanned_in_parts
                    count += 1
                else:
                    self._gather_for(node)
                self._note_call(node, strategy, prices[node])
            elif moves_little(node) or spelled(node) in _VIEWS:
                pass
            elif any(True for _ in self.sequence.classes_of(node)):
                if node.target is cp_scan:
                    self._gather_for(node)
                gathered.setdefault(module_path(node), []).append(node)
        for calls in gathered.values():
            self._note_calls(calls, MixerStrategy.GATHER)
        return count

    def _gather_for(self, node: fx.Node) -> None:
        """Gather what a call reads, as it was priced; DTensor would choose anew."""
        for operand in node.all_input_nodes:  # in one order on all ranks
            dim = self.sequence.tokens.dims.get(operand)
            if dim is not None and operand in self.sequence.computed:
                self._insert(operand, [node], dim.dim, None)

    def _note(
        self, mixers: list[fx.Node], region: Region, prices: dict[fx.Node, Seconds]
    ) -> None:
        """Note what is computed in parts along another dimension, for people."""
        kept = [x for x in mixers if x in prices]
        for node in kept:
            dim = self._dim_of(node, region.entries) if is_mixer(node) else ""
            self._note_call(node, MixerStrategy.EXCHANGE, prices[node], dim)
        if not kept:
            self._note_calls(mixers, MixerStrategy.EXCHANGE)

    def _note_calls(self, mixers: list[fx.Node], strategy: MixerStrategy) -> None:
        """Note calls of torch's; labels that are shifted are not worth a word."""
        mixers = [x for x in mixers if _is_of_floats(x)]
        if mixers:
            first, name = mixers[0], spelled(mixers[0])
            self._warn_of_another(first, name, strategy)
            self.ctx.findings.mixers.append(
                MixerPlan(module_path(first), name, strategy, (), calls=len(mixers))
            )

    def _note_call(
        self, node: fx.Node, strategy: MixerStrategy, prices: Seconds, dim: str = ""
    ) -> None:
        name, forced = _name_of(node), self.ctx.mixer_strategy is strategy
        path, seconds = module_path(node), tuple(prices.items())
        self._warn_of_another(node, name, strategy)
        self.ctx.findings.mixers.append(
            MixerPlan(path, name, strategy, seconds, dim, forced=forced)
        )

    def _warn_of_another(
        self, node: fx.Node, name: str, strategy: MixerStrategy
    ) -> None:
        """Warn if the user named another strategy than that of a call."""
        wanted = self.ctx.mixer_strategy
        if wanted not in (None, strategy):
            why = (
                f"it is not possible for it, which is shared by {strategy.value!r}; "
                '"auto" chooses among those that are'
            )
            warn_unmet(f"{name} at {where(node)}", f"strategy {wanted.value!r}", why)

    def _dim_of(self, node: fx.Node, entries: DimGroup) -> str:
        """Return what the table calls the dimension of a class."""
        for name, dims in mixer_call(node).mixer.independent.items():
            for operand, x in mixer_operands(node).items():
                if operand in dims and entries.dims.get(x) == TokenDim(dims[operand]):
                    return name
        return ""

    def _write(self, region: Region) -> None:
        """Write the exchanges around a region."""
        moved, entries = region.moved, region.entries
        around = {x for node in moved for x in (node, *node.all_input_nodes)}
        for node in sorted(around):
            dim, token_dim = entries.dims.get(node), self.sequence.tokens.dims.get(node)
            if not isinstance(fake_value(node), Tensor):
                continue
            if dim is None:
                if token_dim is not None and node in self.sequence.computed:
                    readers = [x for x in node.users if x in moved]
                    self._insert(node, readers, token_dim.dim, None)
                continue
            if node in moved and _is_whole(node, moved):
                self._insert(node, list(node.users), dim.dim, dim.dim)
            if node not in self.sequence.computed:
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
        last = node
        if node.op == "placeholder":
            last = node.graph.find_nodes(op="placeholder")[-1]
        readers: dict[fx.Node, list[fx.Node]] = {}  # by the last write that they see
        writes = [x for x in self._writes(node) if x not in users and node < x]
        for user in users:
            written = [x for x in writes if x < user]
            readers.setdefault(max(written, default=last), []).append(user)
        args = (node, Wanted.EXCHANGED, source, target)
        value = fake_value(node)
        for last, users in readers.items():
            with node.graph.inserting_after(last):
                new = insert_call(node.graph, constraint, args, like=node, value=value)
            for each in (self.sequence.tokens, *self.sequence.classes):
                if node in each.dims:
                    each.dims[new] = each.dims[node]
            self.sequence.computed.add(new)
            for user in users:
                user.replace_input_with(node, new)

    def _writes(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the calls in the graph of a value that write to its memory."""
        memory = storage(node)
        if memory is not None:
            yield from (
                x
                for x in self.sequence.writes
                if x.graph is node.graph and storage(x.args[0]) == memory
            )


def _name_of(node: fx.Node) -> str:
    return mixer_call(node).short_name if is_mixer(node) else str(node.args[1])


def _is_of_floats(node: fx.Node) -> bool:
    """Tell whether a call makes floating-point numbers."""
    values = pytree.tree_leaves(fake_value(node))
    return any(isinstance(x, Tensor) and x.is_floating_point() for x in values)


def _reads_no_value(node: fx.Node) -> bool:
    """Tell whether a call needs no more of its operands than their dtype."""
    return spelled(node) in CREATIONS and not spelled(node).endswith("_like")


def _is_whole(node: fx.Node, moved: set[fx.Node]) -> bool:
    """Tell whether every rank makes all of a new tensor."""
    name = spelled(node)
    like = name.endswith("_like") and moved.issuperset(node.all_input_nodes)
    return name in CREATIONS and not like
