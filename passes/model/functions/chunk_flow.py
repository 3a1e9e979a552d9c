"""Find out whether a program treats all tokens alike, in whatever chunks it takes them.

See Note [Chunks of tokens]. `chunk_rules.py` has the rules for calls that take a part
of the tokens, or put parts together. For every other call DTensor says what it does
with rows (`row_questions.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.torch_private import pytree

from ...flow.linear_calls import is_linear
from .aten_arguments import (
    BY_SHAPE,
    CONSTANTS,
    at,
    fill_value,
    is_zero,
    shape_of,
    sliced,
)
from .chunk_values import (
    ChunkRows,
    ChunkSum,
    Lower,
    Piece,
    Value,
    Whole,
    joined,
    pieces_between,
    refined,
)
from .local_program import LocalProgram
from .row_questions import (
    SUM,
    RowQuestions,
    RowRole,
    resized,
)

aten = torch.ops.aten
_ADD = aten.add.Tensor
_SEVERAL = 4  # ranks that add up, when DTensor is asked about sums
_MOST_CHOICES = 16
_MOST_BYTES_SUMMED = 1 << 20  # of a sum that all ranks need, in the middle of a program


class NotAlike(Exception):
    """Raised where tokens meet or are treated differently, or where nobody can tell."""


class ChunkFlow:
    """Follows the tokens through one functional graph of aten calls.

    rules: for calls that take a part of the tokens, or put parts together: rule(flow,
        node) -> value, or None for a call like any other.
    tokens: the number of rows of the whole sequence.
    names: the names of placeholders; equal names are equal values.
    values: the value of every node that was read.
    cut_inputs: placeholders that every rank has in full and of which some calls need
        only the rank's own rows, with the dimension of these rows.
    slices: how many calls took a part of the tokens, or put parts together.
    """

    def __init__(
        self,
        tokens: int,
        questions: RowQuestions,
        names: Mapping[fx.Node, str],
        rules: Mapping[Any, ChunkRule],
    ) -> None:
        self.rules = rules
        self.tokens, self.questions, self.names = tokens, questions, names
        self.values: dict[fx.Node, Any] = {}
        self.cut_inputs: dict[fx.Node, int] = {}
        self.slices = 0
        self._numbers: dict[Any, int] = {}
        self._cuts: dict[Any, ChunkRows | None] = {}

    def read(
        self, graph: fx.Graph, inputs: Mapping[fx.Node, Value]
    ) -> Sequence[Value | None]:
        """Read a graph; return the values of its results, made alike for all tokens.

        inputs: the placeholders that have tokens, or are sums; others are whole.

        Raises: NotAlike.
        """
        for node in graph.nodes:
            if node.op == "placeholder":
                self.values[node] = inputs.get(node) or self._whole(node)
            elif node.op == "call_function":
                self.values[node] = self._visit(node)
            elif node.op == "output":
                leaves = pytree.tree_leaves(node.args[0])
                return [self._result(x) for x in leaves]
        raise AssertionError("a graph ends with its output")

    def made(self, *parts: Any) -> int:
        """Return one number for all calls that make the same of the same operands."""
        return self._numbers.setdefault(parts, len(self._numbers))

    def _result(self, node: Any) -> Value | None:
        if not isinstance(node, fx.Node):
            return None
        value = self.values[node]
        if isinstance(value, ChunkRows | ChunkSum) and not self._is_complete(value):
            raise NotAlike(f"{at(node)} is not computed alike for all tokens")
        assert isinstance(value, ChunkRows | ChunkSum | Whole)
        return value

    def _is_complete(self, value: ChunkRows | ChunkSum) -> bool:
        """Tell whether a value covers all tokens, and all are treated alike."""
        if isinstance(value, ChunkSum) and not value.pieces:
            return True
        (first, *more) = value.pieces
        return not more and (first.start, first.stop) == (0, self.tokens)

    def _visit(self, node: fx.Node) -> Any:
        read = [self.values[x] for x in node.all_input_nodes]
        if node.target in BY_SHAPE or all(_is_whole(x) for x in read):
            target: Any = node.target
            if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
                raise NotAlike(f"{at(node)} draws random numbers")
            return self._whole(node)
        rule = self.rules.get(node.target)
        value = None if rule is None else rule(self, node)
        return self._row_parallel(node) if value is None else value

    def _whole(self, node: fx.Node) -> Whole:
        return Whole(lambda program: program.copy(node))

    def _row_parallel(self, node: fx.Node) -> Any:
        """Return the value of a call by what DTensor says that it does with rows."""
        rows = {x: v for x, v in self._read(node) if isinstance(v, ChunkRows)}
        sums = {x: v for x, v in self._read(node) if isinstance(v, ChunkSum)}
        if any(isinstance(v, tuple) for _, v in self._read(node)):
            raise NotAlike(f"{at(node)} reads several results at once")
        if sums and not rows:
            value = self._of_sums(node, sums)
            if value is not None:
                return value
        if sums:  # all ranks need them
            for x, value in sums.items():
                self.values[x] = self._summed(x, value)
            if not rows:
                return self._whole(node)
        (start, stop), *other_ranges = {(v.start, v.stop) for v in rows.values()}
        if other_ranges:
            raise NotAlike(f"{at(node)} combines different tokens")
        return self._of_rows(node, rows, start, stop)

    def _read(self, node: fx.Node) -> Iterator[tuple[fx.Node, Any]]:
        return ((x, self.values[x]) for x in node.all_input_nodes)

    def _of_rows(
        self, node: fx.Node, rows: dict[fx.Node, ChunkRows], start: int, stop: int
    ) -> Any:
        """Return the value of a call on rows, or on constants whose rows are taken."""
        rows_and_roles = self._roles(node, rows, start, stop)
        if rows_and_roles is None:
            raise NotAlike(f"{at(node)} needs several tokens at once")
        rows, roles = rows_and_roles
        operands = list(rows)
        ranges = refined([rows[x].pieces for x in operands])

        def pieces(number: int) -> tuple[Piece, ...]:
            parts = []
            for first, last, makers in ranges:
                text = self._text(node, operands, makers, stop - start)
                parts.append(Piece(first, last, self.made(number, *text)))
            return joined(parts)

        def lower(program: LocalProgram) -> fx.Node:
            count = program.count(start, stop)
            replaced = {x: program.of(rows[x]) for x in operands}
            dim = next((role for role in roles if isinstance(role, int)), None)
            args = resized(node.target, node.args, dim, stop - start, count)
            return program.copy(node, replaced, args)

        return _values(node, roles, pieces, lower)

    def _roles(
        self, node: fx.Node, rows: dict[fx.Node, ChunkRows], start: int, stop: int
    ) -> tuple[dict[fx.Node, ChunkRows], list[RowRole]] | None:
        """Return operands with rows and the roles of the results; None if unknown."""
        count = stop - start
        whole_inputs = [x for x, v in self._read(node) if isinstance(v, Whole)]
        choices = [
            [None, *(d for d, n in enumerate(shape_of(x)) if n == count)]
            for x in whole_inputs
        ]
        for dims in itertools.islice(itertools.product(*choices), _MOST_CHOICES):
            chosen = {
                x: self.cut(x, dim, start, stop)
                for x, dim in zip(whole_inputs, dims, strict=True)
                if dim is not None
            }
            if None in chosen.values() or not (rows or chosen):
                continue
            tried = rows | {x: v for x, v in chosen.items() if v is not None}
            operands: dict[fx.Node, RowRole] = {x: v.dim for x, v in tried.items()}
            roles = self.questions.roles(node, operands, count)
            if roles is not None and None not in roles:
                return tried, roles
        return None

    def cut(self, node: fx.Node, dim: int, start: int, stop: int) -> ChunkRows | None:
        """Return rows `start` to `stop` of a value that every rank has, or None.

        dim: the dimension that has these rows, and no others.
        """
        key = (node, dim, start, stop)
        if key not in self._cuts:
            self._cuts[key] = None  # until it is known
            try:
                self._cuts[key] = self._cut_now(node, dim, start, stop)
            except NotAlike:
                return None
        return self._cuts[key]

    def _cut_now(
        self, node: fx.Node, dim: int, start: int, stop: int
    ) -> ChunkRows | None:
        if node.op == "placeholder":
            whole = (start, stop) == (0, self.tokens)
            if not whole or self.cut_inputs.setdefault(node, dim) != dim:
                return None
            return ChunkRows(
                dim,
                (Piece(start, stop, self.made("input", node.name)),),
                lambda program: program.own_rows(node),
            )
        if node.op != "call_function":
            return None
        arguments: tuple[Any, ...] = node.args
        if node.target is aten.slice.Tensor:
            source, *rest = arguments
            of, low, _, step = sliced(source, tuple(rest))
            if of == dim:
                first = start - low
                whole_rows = self.cut(source, dim, first, first + shape_of(source)[dim])
                if whole_rows is None or step != 1:
                    return None
                return self.part(whole_rows, start, stop)
        if node.target in CONSTANTS:
            value = node.meta["val"]
            shape = [-1 if d == dim else n for d, n in enumerate(value.shape)]
            number = fill_value(node)
            if isinstance(number, fx.Node):
                return None
            name = ("constant", str(number), str(shape), value.dtype)

            def lower(program: LocalProgram) -> fx.Node:
                sizes = list(value.shape)
                sizes[dim] = program.count(start, stop)
                like = {"dtype": value.dtype, "device": value.device}
                if number == "empty":
                    return program.call(aten.empty.memory_format, (sizes,), like)
                return program.call(aten.full.default, (sizes, number), like)

            return ChunkRows(dim, (Piece(start, stop, self.made(*name)),), lower)
        result = self._of_rows(node, {}, start, stop)
        return result if isinstance(result, ChunkRows) and result.dim == dim else None

    def part(self, rows: ChunkRows, start: int, stop: int) -> ChunkRows:
        """Return rows `start` to `stop`, numbered as in the whole sequence."""
        if (start, stop) == (rows.start, rows.stop):
            return rows

        def lower(program: LocalProgram) -> fx.Node:
            low = program.count(rows.start, start)
            high = program.count(rows.start, stop)
            args = (program.of(rows), rows.dim, low, high)
            return program.call(aten.slice.Tensor, args)

        return ChunkRows(rows.dim, pieces_between(rows.pieces, start, stop), lower)

    def _of_sums(self, node: fx.Node, sums: dict[fx.Node, ChunkSum]) -> Value | None:
        """Return the value of a linear call of sums; None for any other call.

        Zeros that every rank has are sums as well.
        """
        zeros = {
            x: ChunkSum((), v.lower)
            for x, v in self._read(node)
            if isinstance(v, Whole) and is_zero(x) and node.target is _ADD
        }
        operands = sums | zeros
        first = node.args[0]  # the list of a cat is none
        if not isinstance(first, fx.Node) or first not in operands:
            return None
        if not is_linear(node, operands):
            return None
        if len(operands) > 1 and node.target is not _ADD:
            return None
        if not node.meta["val"].is_floating_point():
            return None
        if node.target is _ADD and len(operands) != len(node.all_input_nodes):
            return None  # what every rank has would be added once per rank
        if node.target is _ADD and not self._adds(node):
            return None
        roles = self.questions.roles(node, dict.fromkeys(operands, SUM), _SEVERAL)
        if roles is None or any(role != SUM for role in roles):
            return None
        order = list(operands)
        pieces = []
        for start, stop, makers in refined([operands[x].pieces for x in order]):
            terms = [x for x in makers if x is not None]
            if node.target is _ADD and len(terms) == 1:
                pieces.append(Piece(start, stop, terms[0]))
            else:
                text = self._text(node, order, makers)
                pieces.append(Piece(start, stop, self.made(*text)))

        def lower(program: LocalProgram) -> fx.Node:
            if node.target is _ADD:
                terms = [x for x in order if program.has_rows(operands[x].pieces)]
                alike = {str(_layout(x)) for x in (*order, node)}
                if len(terms) == 1 and len(alike) == 1:
                    return program.of(operands[terms[0]])
            return program.copy(node, {x: program.of(operands[x]) for x in order})

        return _values(node, roles, lambda _: joined(pieces), lower)  # type: ignore[no-any-return]

    def _adds(self, node: fx.Node) -> bool:
        """Tell whether a call of aten.add only adds two tensors, with no factor."""
        return not node.kwargs and all(isinstance(x, fx.Node) for x in node.args)

    def _summed(self, node: fx.Node, value: ChunkSum) -> Whole:
        """Return the sum of a value over all ranks.

        Raises: NotAlike.
        """
        tensor = node.meta["val"]
        if tensor.numel() * tensor.itemsize > _MOST_BYTES_SUMMED:
            raise NotAlike(f"{at(node)} is a large sum that every token needs")
        if not self._is_complete(value):
            raise NotAlike(f"{at(node)} is a sum over one chunk of tokens")
        return Whole(lambda program: program.summed(program.of(value)))

    def _text(
        self,
        node: fx.Node,
        operands: Sequence[fx.Node],
        makers: Sequence[int | None],
        count: int = 0,
    ) -> tuple[Any, ...]:
        """Describe a call on `count` rows, with what made its operands."""
        names = dict(zip(operands, makers, strict=True))

        def name(x: fx.Node) -> str:
            return f"<{names[x]}>" if x in names else f"<whole {self._same(x)}>"

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), name)
        args = resized(node.target, args, None, count)
        return str(node.target), str(args), str(kwargs)

    def _same(self, node: fx.Node) -> int:
        """Return one number for values that every rank has and that are made alike."""
        if node.op != "call_function":
            return self.made("whole", node.op, self.names.get(node, node.name))
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda x: f"<{self._same(x)}>"
        )
        return self.made("whole", str(node.target), str(args), str(kwargs))


def _values(
    node: fx.Node,
    roles: Sequence[RowRole],
    pieces: Callable[[int], tuple[Piece, ...]],
    lower: Lower,
) -> Any:
    """Make the value of a call, or a tuple with a value for each of its results."""

    def value(
        number: int, role: RowRole, write: Callable[[LocalProgram], fx.Node]
    ) -> Value:
        if isinstance(role, int):
            return ChunkRows(role, pieces(number), write)
        return ChunkSum(pieces(number), write)

    if isinstance(node.meta["val"], Tensor):
        return value(0, roles[0], lower)
    whole = Whole(lower)  # all results, in a list

    def item(number: int) -> Lower:
        return lambda program: program.item(program.of(whole), number)

    return tuple(value(i, role, item(i)) for i, role in enumerate(roles))


def _is_whole(value: Any) -> bool:
    return isinstance(value, Whole)


def _layout(node: fx.Node) -> Any:
    value = node.meta["val"]
    return value.shape, value.dtype


ChunkRule = Callable[[ChunkFlow, fx.Node], Any]
