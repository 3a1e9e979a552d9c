"""Find the calls that bring tokens together, and dimensions that they leave apart."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import Shard

from cpcompile.geometry.layout import leaves_ranks_empty
from cpcompile.geometry.lengths import expected, is_symbol

from ...flow.flow import flows_of
from ...graph.attention_calls import is_attention
from ...graph.calls import canonical_call, spelled
from ...graph.context import Context, InputKind
from ...graph.cp_attention import is_cp_attention
from ...graph.effects import is_in_place
from ...graph.mixer_calls import independent_dims, is_mixer, result_roles
from ...graph.nodes import (
    all_graphs,
    all_nodes,
    expected_shape,
    fake_mode_of,
    fake_value,
    reached,
    storage,
    sub_graph,
)
from ...graph.sequence_tokens import TokenDim, is_row_parallel_operand
from .convolutions import CONVOLUTIONS, convolved, is_taken_in, reach_along
from .dim_flows import OF_POSITIONS, dim_flows, part_written, token_operands
from .dim_group import CREATIONS, DimGroup, linked_values

_MOVES = (
    "cat", "chunk", "diff", "flip", "gather", "getitem", "index_select", "narrow",
    "pad", "roll", "select", "split", "split_with_sizes", "tensor_split",
)  # fmt: skip
"""Calls that move tokens, or pick few."""

_ANYWHERE = (
    "mean", "expand_as", "logsigmoid", "log_sigmoid", "prelu", *CONVOLUTIONS,
)  # fmt: skip
"""Calls that ranks share out wherever their operand is split."""

_OF_TOKENS = (
    *(*_ANYWHERE, *OF_POSITIONS),
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy",
    "dropout", "embedding", "huber_loss", "index_add", "index_copy", "index_fill",
    "index_put", "kl_div", "l1_loss", "mse_loss", "nll_loss", "poisson_nll_loss",
    "repeat", "scatter", "scatter_add", "sgn", "smooth_l1_loss", "soft_margin_loss",
    "take", "unfold",
)  # fmt: skip
"""Calls that ranks share out by tokens, whatever flow says."""

FARTHEST = 256
"""So many calls ahead of a value are asked what they bring together."""


class MixedSequence:
    """The values and calls of a graph that have sequences of one length.

    tokens: values that have them. computed: values that are computed of inputs with
    tokens, of any length.
    classes: dimensions along which entries keep apart, as far as they were asked for.
    others: the values that have sequences of other lengths.
    writes: calls that write to the memory of their first operand.
    flows: where dimensions go in calls.

    is_given: whether an input has such a sequence. Others are made of a longer one.
    exchanged: values that ranks share out along another dimension already, as parts of
    a sequence of another length; they have no tokens here.
    """

    def __init__(
        self,
        graph: fx.Graph,
        ctx: Context,
        tokens: int,
        seeds: dict[fx.Node, TokenDim],
        exchanged: Iterable[fx.Node] = (),
    ) -> None:
        self.ranks = ctx.ranks
        self.nodes = [
            node
            for each in all_graphs(graph)
            for node in each.nodes
            if sub_graph(node) is None
        ]
        self.flows = flows_of(fake_mode_of(graph), ctx.mesh.device_type)
        self.links = linked_values(graph)
        self.tokens = DimGroup(self.flows, self.links, tokens, 1)
        found = {x: d for x, d in seeds.items() if dim_size(x, d) == tokens}
        tried: set[fx.Node] = set()  # some have tokens in two dimensions, so in none
        while found:
            self.tokens.grow(found)
            tried.update(found)
            found = {
                x: d
                for x, d in self.moved_results()
                if dim_size(x, d) == tokens and x not in {*tried, *self.tokens.dims}
            }
        self.classes: list[DimGroup] = []
        self.others: list[DimGroup] = []
        self.writes = [
            x for x in self.nodes if is_in_place(x) and isinstance(x.args[0], fx.Node)
        ]
        self._written = _written_memory(self.writes)
        self.is_given = any(x.op == "placeholder" for x in self.tokens.dims)
        inputs = {x for x in (*seeds, *self.tokens.dims) if x.op == "placeholder"}
        self.computed = _computed_of(graph, inputs, self.links).difference(exchanged)

    def mixes(self, node: fx.Node) -> bool:
        """Tell whether a call brings tokens together that ranks have."""
        if node.op not in ("call_function", "call_method") or sub_graph(node):
            return False
        if node not in self.computed:
            return False
        operands = convolved(node)
        if operands is not None:  # what most need of neighbours is little
            source = operands[0]
            if spelled(source) == "pad" and is_taken_in(source):
                source = canonical_call(source).arguments["input"]
            many = self.tokens.entries / self.ranks
            return source in self.tokens.dims and (self.borrowed(node) or 0) >= many
        if _knows_tokens(node):
            return False
        if spelled(node) in CREATIONS:
            return False
        if not any(x in self.tokens.dims for x in node.all_input_nodes):
            return False
        if self.tokens.is_local(node) or self.tokens.is_sum(node):
            return False
        return not self._makes_windows(node)

    def borrowed(self, node: fx.Node) -> int | None:
        """Return how many tokens of others a rank reads for a convolution.

        None for any other call, and where no tokens are known.
        """
        operands = convolved(node)
        for tokens in (self.tokens, *self.others):
            dim = None if operands is None else tokens.dims.get(operands[0])
            if dim is not None:
                return reach_along(node, dim.dim)
        return None

    def _makes_windows(self, node: fx.Node) -> bool:
        """Tell whether a view makes windows that stay apart, some for every rank."""
        if spelled(node) not in ("view", "reshape", "unflatten"):
            return False
        source = canonical_call(node).arguments["input"]
        dim, shape = self.tokens.dims[source], expected_shape(fake_value(node))
        before = expected_shape(fake_value(source))
        if dim.outer > 1 or windows(before, shape, dim.dim) is None:
            return False
        if leaves_ranks_empty(shape[dim.dim], self.ranks):
            return False
        return self._stay_apart(node, dim.dim)

    def _stay_apart(self, node: fx.Node, dim: int) -> bool:
        """Tell whether entries of a dimension meet nowhere ahead but at borders."""
        waiting, seen = [(self.class_ahead(node, dim), node)], {node}
        while waiting and len(seen) < FARTHEST:
            entries, value = waiting.pop()
            for user in value.users:
                if user in seen or not computes(user):
                    continue
                if spelled(user) == "setitem" and user.args[0] is value:
                    continue  # what else is assigned to it
                seen.add(user)
                found = self.consumers_of(entries, value, user)
                if found is None:
                    return False
                waiting += found
        return True

    def consumers_of(
        self, entries: DimGroup, value: fx.Node, user: fx.Node
    ) -> list[tuple[DimGroup, fx.Node]] | None:
        """Return the values of a call that have entries of an operand, with classes.

        These are the same entries, or those that are left of them, or windows of them.
        None where entries meet.
        """
        written: fx.Node = user.args[0] if part_written(user) else user  # type: ignore[assignment]
        values = entries.consumers_of(user) if written is user else None
        if values is not None:
            entries.dims |= values
            return [(entries, x) for x in values]
        if spelled(user) == "mean":  # of them, which ranks add up in parts
            return []
        at = entries.dims[value]
        if at.outer > 1 or not isinstance(fake_value(written), Tensor):
            return None
        out = self._kept(user, value, at)
        if out is None or dim_size(written, TokenDim(out)) == 1:
            return None
        return [(self.class_ahead(written, out), written)]

    def _kept(self, node: fx.Node, source: fx.Node, at: TokenDim) -> int | None:
        """Return where a call has windows of entries, or all but a few."""
        if spelled(node) in ("view", "reshape", "unflatten"):
            before, after = (expected_shape(fake_value(x)) for x in (source, node))
            return None if windows(before, after, at.dim) is None else at.dim
        if spelled(node) in OF_POSITIONS:
            x = canonical_call(node).arguments["input"]
            size = dim_size(node, at) if at.dim > 1 else 0
            return None if x is not source or size < self.ranks else at.dim
        if not moves_little(node) and convolved(node) is None:
            return None
        flows = part_written(node) or dim_flows(node) or ()
        out = [x.out for x in flows if x.source is source and x.dim == at.dim]
        return out[0] if out else None

    def is_of_others(self, node: fx.Node) -> bool:
        """Tell whether a value has tokens of a sequence of another length."""
        return any(node in other.dims for other in self.others)

    def is_shared_in_others(self, node: fx.Node) -> bool:
        """Tell whether ranks make a call on their own tokens of another sequence."""
        return any(
            any(x in other.dims for x in node.all_input_nodes)
            and (other.is_local(node) or other.is_sum(node))
            for other in self.others
        )

    def moved_results(self) -> Iterator[tuple[fx.Node, TokenDim]]:
        """Yield results that have tokens of this sequence, or as many as windows of it.

        These are results of calls that move tokens, and of those that make positions of
        positions: convolutions, pooling and norms.
        """
        for node in self.nodes:
            if not isinstance(fake_value(node), Tensor):
                continue
            for source, dim, out in _tokens_through(node):
                moved = self.tokens.dims.get(source) == TokenDim(dim)
                if moved and dim_size(node, TokenDim(out)) > 1:
                    yield node, TokenDim(out)
                    break

    def classes_of(self, node: fx.Node) -> Iterator[DimGroup]:
        """Yield the classes of dimensions that a call treats entry by entry.

        Of a known mixer first those that all of its operands have. Others, of which
        every rank reads some in whole, are for ranks that cannot share the first.
        """
        operands = [x for x in node.all_input_nodes if x in self.tokens.dims]
        if not is_mixer(node):
            for operand in operands:
                for dim in range(fake_value(operand).ndim):
                    yield from self._class_of(node, operand, dim)
            return
        are_even = False
        claims = [[*operands.items()] for operands, _ in independent_dims(node)]
        for claim in sorted(claims, key=len, reverse=True):
            claim = [(x, dim) for x, dim in claim if x in operands]
            if are_even and len(claim) < len(operands):
                continue
            whole = [x for x in operands if x not in dict(claim)]
            for operand, dim in claim:
                entries = next(self._class_of(node, operand, dim, whole), None)
                if entries is not None:
                    are_even |= entries.entries % self.ranks == 0
                    yield entries
                    break

    def _class_of(
        self,
        node: fx.Node,
        operand: fx.Node,
        dim: int,
        whole: Sequence[fx.Node] = (),
    ) -> Iterator[DimGroup]:
        """Yield the class of a dimension, if a call treats it entry by entry.

        whole: operands of which the call needs all for each entry. The dimension may
        be theirs, too, as of q, k and v that one projection makes.
        """
        size = fake_value(operand).shape[dim]
        if dim == self.tokens.dims[operand].dim or is_symbol(size):
            return  # a symbol may be less than the ranks another time
        size = expected(size)  # a guard may have fixed it
        if leaves_ranks_empty(size, self.ranks):
            return  # views of empty parts fail
        known = next(
            (c for c in self.classes if c.dims.get(operand) == TokenDim(dim)), None
        )
        if known is None:
            known = DimGroup(self.flows, self.links, size, self.ranks, whole)
            known.grow({operand: TokenDim(dim)})
            self.classes.append(known)
        if known.is_local(node):
            yield known

    def class_ahead(self, node: fx.Node, dim: int) -> DimGroup:
        """Return the class of a dimension that has one value, to be followed ahead."""
        entries = DimGroup(self.flows, self.links, dim_size(node, TokenDim(dim)), 1)
        entries.dims[node] = TokenDim(dim)
        return entries

    def is_written(self, node: fx.Node) -> bool:
        """Tell whether a call writes to the memory of a value, or of an operand."""
        values = (node, *node.all_input_nodes) if is_in_place(node) else (node,)
        return any(storage(x) in self._written for x in values)


def _tokens_through(node: fx.Node) -> Iterator[tuple[fx.Node, int, int]]:
    """Yield (source, dimension, dimension of the result) of tokens that go on."""
    operands = convolved(node)
    if operands is None and spelled(node) not in OF_POSITIONS:
        for flow in dim_flows(node) or () if moves_little(node) else ():
            yield flow.source, flow.dim, flow.out
        return
    x = operands[0] if operands else canonical_call(node).arguments["input"]
    channels = None
    if operands:
        channels = fake_value(x).ndim - fake_value(operands[1]).ndim + 1
    for dim in range(fake_value(x).ndim):
        if dim != channels:
            yield x, dim, dim


def find_sequences(
    graph: fx.Graph, ctx: Context, of_calls: bool = True
) -> Iterator[tuple[fx.Node, TokenDim]]:
    """Yield values whose tokens are known, with the dimension that has them.

    These are inputs and, with `of_calls`, what attention and mixers read and make.
    """
    for node, given in ctx.inputs.items():
        if given.kind is InputKind.FULL and given.dim is not None:
            yield node, TokenDim(given.dim)
        for axis, placement in enumerate(given.placements):
            if axis == ctx.axis and isinstance(placement, Shard):
                yield node, TokenDim(placement.dim)
    if not of_calls:
        return
    windows = {c.node for c in ctx.findings.calls if c.already_local}
    for node in all_nodes(graph):
        for operand, dim in () if node in windows else token_operands(node):
            yield operand, TokenDim(dim)
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and is_mixer(source):
            tokens, _ = result_roles(source, node.args[1])  # type: ignore[arg-type]
            if tokens is not None:
                yield node, TokenDim(tokens)
        elif _is_attended(source) and node.args[1] == 0:  # not the log-sum-exp
            yield node, TokenDim(fake_value(node).ndim - 2)


def _is_attended(source: object) -> bool:
    return isinstance(source, fx.Node) and is_cp_attention(source)


def dim_size(node: fx.Node, dim: TokenDim) -> int:
    """Return the size of a dimension of a value."""
    return expected_shape(fake_value(node))[dim.dim]


def windows(before: Sequence[int], after: Sequence[int], dim: int) -> int | None:
    """Return how many tokens a window has if a view cuts dimension `dim` into such.

    The windows are dimension `dim` of the result, and what is in one of them is behind
    it, in whatever shape. None for any other view.
    """
    if list(before[:dim]) != list(after[:dim]) or len(after) <= dim + 1:
        return None
    if not after[dim] or before[dim] % after[dim]:
        return None
    size = before[dim] // after[dim]
    return size if size > 1 else None


def moves_little(node: fx.Node) -> bool:
    """Tell whether a call that brings tokens together moves few, or picks few."""
    if node.target is operator.getitem:
        source: Any = node.args[0]
        if not isinstance(fake_value(source), Tensor):  # one of several results
            return moves_little(source)
    return spelled(node) == "setitem" or spelled(node) in _MOVES


def stays_on_tokens(node: fx.Node) -> bool:
    """Tell whether a call has to be on the side of the tokens, whatever flow says."""
    return _knows_tokens(node) and canonical_call(node).name not in _ANYWHERE


def computes(node: fx.Node) -> bool:
    """Tell whether a call makes values of others; attention knows what meets."""
    if node.op == "output" or sub_graph(node) is not None:
        return False
    if is_attention(node) or is_cp_attention(node) or is_row_parallel_operand(node):
        return False
    return spelled(node) not in CREATIONS


def _knows_tokens(node: fx.Node) -> bool:
    """Tell whether ranks share out a call by tokens, whatever flow says."""
    if is_attention(node) or is_cp_attention(node) or is_row_parallel_operand(node):
        return True
    return canonical_call(node).name in _OF_TOKENS


def _written_memory(writes: Iterable[fx.Node]) -> set[int | None]:
    """Return the memory that calls write to, but for that of new tensors.

    Whatever names such memory has to lie in it as the caller knows it.
    """
    written = {
        storage(node.args[0])  # type: ignore[arg-type]
        for node in writes
        if not (spelled(node) == "setitem" and spelled(node.args[0]) in CREATIONS)  # type: ignore[arg-type]
    }
    return written - {None}


def _computed_of(
    graph: fx.Graph, inputs: set[fx.Node], links: dict[fx.Node, list[fx.Node]]
) -> set[fx.Node]:
    """Return what is computed of some inputs, and these."""

    def after(node: fx.Node) -> Iterator[fx.Node]:
        read = [x for x in node.users if spelled(x) not in CREATIONS]
        written = [x.args[0] for x in read if spelled(x) == "setitem"]
        for other in (*read, *written, *links.get(node, ())):
            if isinstance(other, fx.Node) and other.op != "output":
                yield other

    return {*reached(inputs, after)}
