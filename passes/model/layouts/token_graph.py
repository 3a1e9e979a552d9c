"""Find what a layout means for every node of a sharded graph.

For each node with tokens of one sequence: may it compute laid out tokens, which of its
constants have tokens too, and what would it cost? `build` puts the answers into a
LayoutCut; the proofs are those of permutation_proof.

Note [Layouts of moved tokens]
All layouts exist for every length, and a slice or a shift by few tokens moves few in
most of them: x[:, 1:] in zigzag is zigzag, too, and a rank lends a token at each border
of its parts. So values of other lengths are on the same sides, if calls that move
tokens lead to them. A length that is a multiple of another one is left out, as a
dimension with twice as many entries could have two for every token as well.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.geometry.layout import Layout
from cpcompile.geometry.lengths import has_tokens
from cpcompile.torch_private import pytree

from ...flow.dim_rules import dim_map
from ...flow.trial import STATE_CALLS
from ...graph.calls import function_of
from ...graph.context import Context
from ...graph.cp_attention import is_cp_attention, needs_order, operands_of, spec_of
from ...graph.nodes import fake_value, sub_graph
from ...graph.sequence_tokens import TokenAxis, TokenDim
from ...placement.joint_calls import (
    cp_tp_leave_chunks,
    cp_tp_lift,
    cp_tp_lower,
    cp_tp_move,
    cp_tp_place,
)
from ...placement.placement_calls import (
    cp_dropout_mask,
    cp_exchange,
    cp_from_local,
    cp_gather,
    cp_key_source,
    cp_mixed_in_parts,
    cp_place,
    cp_shard,
    cp_to_local,
)
from ...placement.scan_parts import cp_scanned_in_parts
from ...placement.token_moves import cp_move_tokens, cp_split_tokens
from ...placement.token_picks import cp_gather_at, cp_pick_tokens
from ...placement.token_positions import cp_numbers_at, cp_summed_at, cp_written_at
from .layout_cut import LayoutCut
from .permutation_proof import PermutationProofs

# What goes to a joint mesh or comes back, and looks at no token.
_GOING = (cp_tp_lift, cp_tp_move, cp_tp_lower)
_ENTERING = (cp_from_local, cp_tp_place)
_LEAVING = (cp_to_local, cp_tp_leave_chunks)
_READING_A_SHAPE = (cp_dropout_mask, cp_written_at, cp_numbers_at, cp_summed_at)
# Calls that bring tokens together by messages of their own, which no proof sees.
_IN_ORDER = (cp_exchange, cp_mixed_in_parts, cp_scanned_in_parts)


@dataclass(frozen=True)
class Use:
    """A read of a value with tokens by `node`, which is on the side of `vertex`.

    index: which argument reads it, where that matters; None is all of them.
    """

    vertex: Hashable
    node: fx.Node
    index: int | None = None

    def read_instead(self, old: fx.Node, new: fx.Node) -> None:
        """Make the node read `new` in place of `old`."""
        if self.index is None:
            self.node.replace_input_with(old, new)
            return
        outputs = self.node.op == "output"
        before: Any = self.node.args[0] if outputs else self.node.args
        args = list(before)
        args[self.index] = new
        self.node.args = (tuple(args),) if outputs else tuple(args)


@dataclass(frozen=True)
class LayoutPrices:
    """Seconds of relayouts, of reorders, and of attention calls.

    attention: seconds of a call (contiguous, laid out); None where it must not be.
    move: of a call that moves tokens, in a layout. layout: the one of laid out tokens.
    """

    relayout: Callable[[DTensor], float]
    reorder: Callable[[Tensor], float]  # of a plain, full tensor
    attention: Callable[[fx.Node], tuple[float | None, float | None]]
    move: Callable[[fx.Node, Layout], float]
    layout: Layout


class TokenGraph:
    """The nodes of a graph that have tokens of one sequence, or of parts of it.

    Tokens that are moved to a sequence of another length, as by a slice, are laid out
    as they were (Note [Layouts of moved tokens]).

    proofs: of the sequence. others: of the sequences of other lengths.
    nodes: the nodes that read or make such tokens; each is a vertex.
    vertices: the vertex of every value with tokens.
    uses: the reads of every value with tokens.
    constants: by node, its inputs without a sharded dimension that have tokens.
    """

    def __init__(
        self,
        ctx: Context,
        proofs: PermutationProofs,
        cut: LayoutCut,
        prices: LayoutPrices,
        others: Sequence[PermutationProofs] = (),
    ) -> None:
        self.ctx, self.proofs, self.cut, self.prices = ctx, proofs, cut, prices
        self.others = others
        self.nodes: list[fx.Node] = []
        self.vertices: dict[fx.Node, Hashable] = {}
        self.uses: dict[fx.Node, list[Use]] = {}
        self.constants: dict[fx.Node, dict[fx.Node, TokenDim]] = {}

    def build(self, graph: fx.Graph) -> None:
        """Fill the cut for a graph and its checkpoint regions."""
        self._walk(graph)
        for producer, uses in self.uses.items():
            value = fake_value(producer)
            dim = self.dim(value)
            movable = (
                dim is not None
                and self._has_whole(value, dim)
                and not self._is_cut_again(value)
            )
            self.cut.feed(
                self.vertices[producer],
                [use.vertex for use in uses],
                producer,
                self.prices.relayout(value) if movable else None,
            )

    def _has_whole(self, value: Any, dim: TokenDim) -> bool:
        """Tell whether a dimension has the tokens, and nothing besides."""
        proofs = self.proofs_of(value)
        size = value.shape[dim.dim]
        return has_tokens(size, proofs.tokens, proofs.symbolic)

    def dim(self, value: Any) -> TokenDim | None:
        """Return the token dim of a value, or of the first of several that has one."""
        leaves = pytree.tree_leaves(value)
        dims = (self.proofs_of(x).dim_of(x) for x in leaves)
        return next((dim for dim in dims if dim is not None), None)

    def proofs_of(self, value: Any) -> PermutationProofs:
        """Return the proofs for the tokens that a value has; if none, of the sequence.

        value: several have tokens of one length.
        """
        leaves = pytree.tree_leaves(value)
        for proofs in (self.proofs, *self.others):
            if any(proofs.dim_of(x) is not None for x in leaves):
                return proofs
        return self.proofs

    def _walk(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            region = sub_graph(node)
            if region is not None:
                inner = region.graph.find_nodes(op="placeholder")
                pairs = zip(inner, node.args[1:], strict=True)
                for index, (placeholder, argument) in enumerate(pairs, start=1):
                    self._pass_on(argument, placeholder, Use(placeholder, node, index))
                self._walk(region.graph)
            elif node.op in ("call_function", "call_method"):
                self._visit(node)

    def _pass_on(self, producer: Any, receiver: fx.Node, use: Use) -> None:
        """Note that a value goes into a checkpoint region, or comes out of it."""
        if isinstance(producer, fx.Node) and producer in self.vertices:
            self._add(receiver)
            self.uses.setdefault(producer, []).append(use)

    def _add(
        self,
        node: fx.Node,
        contiguous: float | None = 0.0,
        laid_out: float | None = 0.0,
    ) -> None:
        self.cut.add(node, contiguous, laid_out)
        self.nodes.append(node)
        if self.dim(fake_value(node)) is not None:
            self.vertices[node] = node

    def _read(self, node: fx.Node, vertex: Hashable) -> None:
        for producer in node.all_input_nodes:
            if producer in self.vertices:
                self.uses.setdefault(producer, []).append(Use(vertex, node))

    def _visit(self, node: fx.Node) -> None:
        value = fake_value(node)
        if node.target in STATE_CALLS:
            call_node(node)  # what follows runs under it
        elif self._is_one_of_several(node) or node.target in _READING_A_SHAPE:
            pass
        elif is_cp_attention(node):
            self._attention(node)
        elif node.target in (cp_shard, cp_place):
            self._place(node)
        elif node.target in _GOING:
            if self._has_tokens(node):
                self._add(node)
                self._read(node, node)
        elif node.target in (cp_gather, cp_key_source):
            if self._has_tokens(node):
                self._add(node, laid_out=self.prices.reorder(value))
                self._read(node, node)
        elif node.target in _LEAVING:
            if self._has_tokens(node):
                keeps = self.ctx.keeps_layout and self._is_given_laid_out(node)
                self._add(node, *((None, 0.0) if keeps else (0.0, None)))
                self._read(node, node)
        elif node.target in _ENTERING:
            if self.dim(value) is not None:
                (source,) = node.all_input_nodes
                tokens = self.proofs_of(value).tokens
                laid_out = self.ctx.inputs[source].tokens == tokens
                self._add(node, *((None, 0.0) if laid_out else (0.0, None)))
        elif not self._has_tokens(node) and self.dim(value) is None:
            pass
        elif node.target in (cp_move_tokens, cp_split_tokens):
            self._move(node)
        elif node.target in (cp_pick_tokens, cp_gather_at):
            self._add(node)
            self._read(node, node)
        elif node.target in _IN_ORDER:
            self._add(node, laid_out=None)
            self._read(node, node)
        else:
            self._prove(node)

    def _is_cut_again(self, value: Any) -> bool:
        """Tell whether other axes shard this rank's tokens too.

        They do so in the order of the tokens, so that no other layout is possible.
        """
        placements = value.placements
        return bool(placements.count(placements[self.ctx.axis]) > 1)

    def _is_given_laid_out(self, node: fx.Node) -> bool:
        """Tell whether any input with the tokens of a call is given in the layout."""
        tokens = self._proofs_for(node).tokens
        every = self.ctx.inputs.values()
        return any(graph_input.tokens == tokens for graph_input in every)

    def _is_one_of_several(self, node: fx.Node) -> bool:
        """Tell whether a node is one of several results; note where its tokens are.

        The results are those of a call, or of a checkpoint region.
        """
        if node.target is not operator.getitem:
            return False
        source, index = node.args
        if not isinstance(source, fx.Node) or isinstance(fake_value(source), Tensor):
            return False
        region = sub_graph(source)
        if region is not None:
            inside = region.graph.output_node()
            results: Any = inside.args[0]
            assert isinstance(index, int)
            self._pass_on(results[index], node, Use(node, inside, index))
        elif source in self.vertices and self.dim(fake_value(node)) is not None:
            self.vertices[node] = self.vertices[source]
        return True

    def _has_tokens(self, node: fx.Node) -> bool:
        return any(x in self.vertices for x in node.all_input_nodes)

    def _place(self, node: fx.Node) -> None:
        """Add a cut of a full tensor, which may be as good laid out."""
        source = fake_value(node.args[0])
        if self.dim(fake_value(node)) is None and not self._has_tokens(node):
            return
        free = not isinstance(source, DTensor)
        if not free:
            free = source.placements[self.ctx.axis].is_replicate()
        free = free and not self._is_cut_again(fake_value(node))
        of_other_tokens = node.target is cp_place and len(node.args) > 3
        self._add(node, laid_out=0.0 if free and not of_other_tokens else None)
        self._read(node, node)

    def _attention(self, node: fx.Node) -> None:
        """Add attention: queries and output on one side, keys and values on one."""
        operands = operands_of(node)
        ordered = needs_order(node)
        has = [x in self.vertices for x in operands]
        if self.dim(fake_value(node)) is None and not any(has):
            return
        contiguous: float | None = 0.0
        laid_out: float | None = 0.0
        if ordered and not self._has_whole(fake_value(operands[0]), TokenDim(2)):
            laid_out = None  # the tokens of another sequence, or parts of these
        elif ordered:
            contiguous, laid_out = self.prices.attention(node)
        lies = {self.dim(fake_value(x)) for x in operands if x in self.vertices}
        if lies - {TokenDim(2)}:  # batch or heads, of as many as there are tokens
            contiguous, laid_out = 0.0, None
        self._add(node, contiguous, laid_out)
        keys: Hashable = node
        if not ordered:
            keys = (node, "keys")
            self.cut.add(keys)
        for index, (operand, vertex) in enumerate(
            zip(operands, (node, keys, keys), strict=True)
        ):
            if has[index]:
                self.uses.setdefault(operand, []).append(Use(vertex, node, index))
            elif vertex is node and not (index and spec_of(node).whole_keys):
                self.constants.setdefault(node, {})[operand] = TokenDim(2)

    def _move(self, node: fx.Node) -> None:
        """Add a call that moves tokens, to a sequence that may have another length."""
        split = [x for x in node.all_input_nodes if _is_split(fake_value(x), self.ctx)]
        values = [*map(fake_value, split), *pytree.tree_leaves(fake_value(node))]
        if any(self.dim(x) is None for x in values):
            self._add(node, laid_out=None)
        else:
            layout = self.prices.layout
            prices = [self.prices.move(node, x) for x in (Layout.CONTIGUOUS, layout)]
            self._add(node, *prices)
        self._read(node, node)

    def _is_token_wise(self, node: fx.Node) -> bool:
        """Tell whether the table of calls says so, of operands as they lie.

        It is quicker than the proof, which says the same of these calls.
        """
        value, table = fake_value(node), dim_map(node)
        proofs = self._proofs_for(node)
        if table is None or table.is_view or table.draws or proofs.symbolic:
            return False
        axes = {}
        for operand in node.all_input_nodes:
            x = fake_value(operand)
            dim = proofs.dim_of(x)
            if dim is not None:
                inner = x.shape[dim.dim] // dim.outer // proofs.tokens
                axes[operand] = TokenAxis(dim.dim, dim.outer, inner)
            elif not (
                isinstance(x, DTensor) and x.placements[self.ctx.axis].is_replicate()
            ):
                return False
        at, operands = table.after(node, axes, proofs.tokens) or (None, None)
        if not isinstance(at, TokenAxis) or operands != axes:
            return False  # what is whole would have to be cut, too
        return proofs.dim_of(value) == TokenDim(at.dim, at.outer)

    def _proofs_for(self, node: fx.Node) -> PermutationProofs:
        """Return the proofs for the first operand of a call that has tokens."""
        return self.proofs_of(self.sequence_value(node))

    def sequence_value(self, node: fx.Node) -> Any:
        """Return the first operand that has tokens; if none has, the result."""
        operands = (x for x in node.all_input_nodes if x in self.vertices)
        return fake_value(next(operands, node))

    def _prove(self, node: fx.Node) -> None:
        if self._is_token_wise(node):
            self._add(node)
            self._read(node, node)
            return
        values = fx.node.map_aggregate(
            (node.args, node.kwargs),
            lambda a: fake_value(a) if isinstance(a, fx.Node) else a,
        )
        call = function_of(node)
        proved_dims = self._proofs_for(node).prove(call, *values, fake_value(node))
        arguments = pytree.tree_leaves((node.args, node.kwargs))
        if proved_dims and len(arguments) != len(pytree.tree_leaves(values)):
            proved_dims = None  # an argument is several tensors
        if proved_dims and _differ(proved_dims, arguments):
            proved_dims = None
        self._add(node, laid_out=None if proved_dims is None else 0.0)
        self._read(node, node)
        for index, dim in (proved_dims or {}).items():
            self.constants.setdefault(node, {})[arguments[index]] = dim


def _is_split(value: Any, ctx: Context) -> bool:
    return isinstance(value, DTensor) and value.placements[ctx.axis].is_shard()


def _differ(constants: dict[int, TokenDim], arguments: list[Any]) -> bool:
    """Tell whether a node has tokens as one argument, none or others as another."""
    of_node: dict[fx.Node, set[TokenDim | None]] = {}
    for index, argument in enumerate(arguments):
        if isinstance(argument, fx.Node):
            of_node.setdefault(argument, set()).add(constants.get(index))
    return any(len(dims) > 1 for dims in of_node.values())


def call_node(node: fx.Node) -> None:
    """Run a call that changes a state of torch, such as autocast."""
    args = fx.node.map_aggregate(
        node.args, lambda a: fake_value(a) if isinstance(a, fx.Node) else a
    )
    node.meta["example_value"] = function_of(node)(*args, **node.kwargs)
