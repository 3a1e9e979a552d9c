"""Find which dimension of a value has the tokens that attention works on.

Nobody has to say so: the tokens of q, k and v [B, H, S, D] are dimension 2. From there
the calls are read backwards: from which dimension of which argument do the tokens come?
DTensor's own propagation answers (token_sources); calls that change the number or the
order of tokens say it by their arguments (dim_flows).

    ids -> embedding -> linear -> unflatten -> transpose -> attention
     1         1          1           1            2            2

Where nothing answers, the tokens begin: a patch embedding, a gather. A reading decides
where values lie, never what they are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import NamedTuple

import torch.fx as fx
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cpcompile.geometry.layout import leaves_ranks_empty
from cpcompile.geometry.lengths import expected
from cpcompile.torch_private.fake_tensors import FakeTensorMode

from ...flow.flow import flows_of
from ...flow.token_sources import token_sources
from ...graph.nodes import fake_value, region_arguments, sub_graph
from ...graph.sequence_tokens import SequenceDim, TokenDim
from .dim_flows import dim_flows, part_written


@dataclass(frozen=True)
class _Question:
    """The question of where a sequence in the result of a node comes from.

    index: of several results, which one.
    """

    node: fx.Node
    sequence: SequenceDim
    index: int | None = None


class Origins(NamedTuple):
    """The places that tokens come from.

    nodes: inputs and constants of the graph, and values in which tokens begin, each
        with its dimension.
    parts: whether some tokens are a part of a dimension.
    is_known: whether a known question was reached, which is not followed further.
    steps: the new questions on the way, to be known from now on.
    """

    nodes: set[tuple[fx.Node, int]]
    parts: bool
    is_known: bool
    steps: set[_Question]


_GIVEN = ("placeholder", "get_attr")


def _is_whole(question: _Question) -> bool:
    return question.sequence.dim.outer == 1


class SequenceDims:
    """The sequence dims of a graph and its checkpoint regions, read backwards.

    operands: operands of the attention calls that are to be sharded, each with its
        dimension of tokens.
    found: the sequence dims of every value that leads to attention, as they were met.
    begins: values whose tokens come from nowhere else.
    """

    def __init__(
        self,
        graph: fx.Graph,
        operands: Iterable[tuple[fx.Node, int]],
        fake_mode: FakeTensorMode,
        mesh: DeviceMesh,
        axis: int,
    ) -> None:
        self.ranks = mesh.size(axis)
        self.found: dict[fx.Node, list[SequenceDim]] = {}
        self.begins: set[fx.Node] = set()
        self._flows = flows_of(fake_mode, mesh.device_type)
        self._arguments = dict(region_arguments(graph))
        self.attended: set[int] = set()
        questions = []
        for operand, dim in operands:
            tokens = expected(fake_value(operand).shape[dim])
            self.attended.add(tokens)
            questions.append(_Question(operand, SequenceDim(TokenDim(dim), tokens)))
        self._follow(questions)

    def of(self, node: fx.Node) -> TokenDim | None:
        """Return the only dimension that a value may be split along; else None."""
        dims = self.candidates(node)
        return dims[0] if len(dims) == 1 else None

    def candidates(self, node: fx.Node) -> list[TokenDim]:
        """Return the dimensions along which a value may be split.

        Dimensions of which the tokens are a part count only if there are no whole ones.
        """
        usable = [x for x in self.found.get(node, ()) if self.is_usable(node, x)]
        dims = dict.fromkeys(x.dim for x in usable)
        return [x for x in dims if x.outer == 1] or list(dims)

    def is_usable(self, node: fx.Node, sequence: SequenceDim) -> bool:
        """Tell whether the ranks can share the tokens of a sequence in a value.

        Each rank needs some of them, unless attention works on this number of tokens.
        Ranks need equally many if something is flattened with the tokens behind them.
        """
        if sequence.tokens < 2:
            return False
        attended = sequence.tokens in self.attended
        if not attended and leaves_ranks_empty(sequence.tokens, self.ranks):
            return False
        size = expected(fake_value(node).shape[sequence.dim.dim])
        are_rows = size == sequence.dim.outer * sequence.tokens
        return are_rows or sequence.tokens % self.ranks == 0

    def origins(self, node: fx.Node, dim: int, settled: set[_Question]) -> Origins:
        """Find where the tokens in a dimension of a value come from.

        settled: questions that are not followed further.
        """
        tokens = expected(fake_value(node).shape[dim])
        question = _Question(node, SequenceDim(TokenDim(dim), tokens))
        visited = self._follow([question], settled)
        ends = {
            x
            for x in visited - settled
            if x.node in self.begins
            or (x.node.op in _GIVEN and x.node not in self._arguments)
        }
        whole = {(x.node, x.sequence.dim.dim) for x in ends if _is_whole(x)}
        return Origins(
            whole, len(whole) < len(ends), bool(visited & settled), visited - settled
        )

    def _follow(
        self, questions: list[_Question], settled: Set[_Question] = frozenset()
    ) -> set[_Question]:
        """Return all questions that these lead to; known ones lead no further."""
        visited: set[_Question] = set()
        while questions:
            question = questions.pop()
            if question in visited:
                continue
            visited.add(question)
            if question in settled:
                continue
            node, sequence = question.node, question.sequence
            if isinstance(fake_value(node), Tensor):
                self.found.setdefault(node, []).append(sequence)
            written = self._written(question)
            questions += written
            if node.op == "placeholder":
                if node in self._arguments:
                    questions.append(_Question(self._arguments[node], sequence))
            elif node.op in ("call_function", "call_method"):
                sources = self._before(question)
                if not (sources or written) and isinstance(fake_value(node), Tensor):
                    self.begins.add(node)
                questions += sources
        return visited

    def _written(self, question: _Question) -> list[_Question]:
        """Ask about what is assigned to parts of a tensor: it has the same tokens."""
        node, sequence = question.node, question.sequence
        return [
            _Question(p.source, SequenceDim(TokenDim(p.dim), _size(p.source, p.dim)))
            for user in node.users
            if user.args[:1] == (node,) and sequence.dim.outer == 1
            for p in part_written(user)
            if p.out == sequence.dim.dim
        ]

    def _before(self, question: _Question) -> list[_Question]:
        node, sequence = question.node, question.sequence
        region = sub_graph(node)
        if region is not None:
            (results,) = region.graph.output_node().args
            if question.index is not None:
                results = results[question.index]  # type: ignore[index]
            return (
                [_Question(results, sequence)] if isinstance(results, fx.Node) else []
            )
        flows = dim_flows(node)
        if flows is not None:
            here = _size(node, sequence.dim.dim)
            flows_to_dim = [p for p in flows if p.out == sequence.dim.dim]
            return [
                _Question(p.source, _in_source(p.source, p.dim, sequence, here))
                for p in flows_to_dim
                if sequence.dim.outer == 1 or _size(p.source, p.dim) == here
            ]
        if node.target is operator.getitem and _is_one_of_several(node):
            source, index = node.args
            assert isinstance(source, fx.Node) and isinstance(index, int)
            return [_Question(source, sequence, index)]
        return [
            _Question(argument, SequenceDim(dim, sequence.tokens))
            for argument, dim in token_sources(
                self._flows, node, sequence, question.index
            )
        ]


def _in_source(
    source: fx.Node, dim: int, sequence: SequenceDim, here: int
) -> SequenceDim:
    """Return the sequence that a flow comes from; it may have another length."""
    size = _size(source, dim)
    if size == here:
        return SequenceDim(TokenDim(dim, sequence.dim.outer), sequence.tokens)
    return SequenceDim(TokenDim(dim), size)


def _size(node: fx.Node, dim: int) -> int:
    return expected(fake_value(node).shape[dim])


def _is_one_of_several(node: fx.Node) -> bool:
    source = node.args[0]
    return isinstance(source, fx.Node) and not isinstance(fake_value(source), Tensor)
