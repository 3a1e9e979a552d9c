"""Find the calls around a sort of tokens by expert that are row-wise together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.lengths import Size, expected, times

from ...flow.flow import Flows, Result
from ...flow.shaped_calls import TensorShape, shaped_call
from ...graph.calls import canonical_call
from ...graph.dispatch_calls import NotByRows, need, tensors_read
from ...graph.effects import is_in_place, written_by
from ...graph.nodes import fake_value, storage
from ...graph.sequence_tokens import TokenDim
from .row_kinds import CopiedRows, Counts, Fresh, Kind, Kinds, SumOfTokens, TokenRows


class DispatchRegion:
    """Calls that may run on the rows of a rank, found from one of them on.

    rules: by the name of a call, the rule for the kind of its result; all other calls
        have to be row-wise.
    kinds: the kinds of the values that are computed inside.
    moved: the calls that the region is made of.
    copied: the calls before the region that are computed again inside, because tensors
        with several rows per token are not to be cut outside.
    row_arguments, same_arguments: values from outside, with a row per token or without.
    """

    def __init__(
        self, tokens: Size, flows: Flows, rules: Mapping[str, DispatchRule]
    ) -> None:
        self.tokens, self.flows, self.rules = tokens, flows, rules
        self.kinds: dict[fx.Node, Kinds] = {}
        self.moved: dict[fx.Node, None] = {}
        self.copied: dict[fx.Node, None] = {}
        self.row_arguments: dict[fx.Node, None] = {}
        self.same_arguments: dict[fx.Node, None] = {}
        self._not_counted: dict[fx.Node, int] | None = {}
        self._counting: dict[fx.Node, set[fx.Node]] = {}  # who may read such numbers

    def grow(self, seed: fx.Node, following: Sequence[fx.Node]) -> None:
        """Take in a call, and all that follow from it until rows are those of tokens.

        Raises: NotByRows.
        """
        self._take(seed)
        for node in following:
            met = [self.kinds[x] for x in tensors_read(node) if x in self.moved]
            if all(
                kind == TokenRows(1) or isinstance(kind, SumOfTokens) for kind in met
            ):
                continue
            need(node.op in ("call_function", "call_method"))
            try:
                self._take(node)
            except NotByRows:
                if not all(isinstance(kind, Counts | SumOfTokens) for kind in met):
                    raise
        need(not self.row_arguments.keys() & self.same_arguments.keys())
        for node in (*self.moved, *self.copied):
            outside = [x for x in node.users if not self._has(x)]
            if node in self.moved and outside:
                need(_is_result(self.kinds[node]))

    def results(self) -> dict[fx.Node, bool]:
        """Return the values read outside, and whether each has rows or is a sum."""
        results = {}
        for node in self.moved:
            if any(not self._has(user) for user in node.users):
                results[node] = isinstance(self.kinds[node], TokenRows)
        return results

    def rows(self, x: fx.Node, per_token: int | None = None) -> TokenRows:
        """Return the kind of an argument that has rows.

        One from outside becomes an argument of the region if it has one row per token;
        otherwise it is computed again inside.

        per_token: how many rows per token it has to have, if that matters.
        """
        kind = self.kinds.get(x)
        if kind is None:
            value = fake_value(x)
            need(isinstance(value, Tensor) and value.ndim)
            count = times(value.shape[0], self.tokens)
            need(count > 0)
            if count == 1:
                self.row_arguments[x] = None
                kind = TokenRows(1)
            else:
                self._copy(x)
                kind = self.kinds[x]
        need(isinstance(kind, TokenRows))
        assert isinstance(kind, TokenRows)
        need(per_token in (None, kind.per_token))
        return kind

    def same(self, x: fx.Node) -> None:
        """Note an argument from outside that all tokens share."""
        need(x not in self.kinds and isinstance(fake_value(x), Tensor))
        self.same_arguments[x] = None

    def fresh(self, x: Any, per_token: int) -> Fresh | None:
        """Take in memory that is made to be written into; return its kind.

        None if x is no such memory with `per_token` rows per token.
        """
        if not isinstance(x, fx.Node):
            return None
        kind = self.kinds.get(x)
        if kind is None:
            memory = _made_memory(x, self.tokens)
            if memory is None or memory.per_token != per_token:
                return None
            for source in tensors_read(x):
                self.rows(source, per_token)
            kind = Fresh(per_token, memory.ascending, memory.zero)
            self.kinds[x] = kind
            self.moved[x] = None
        return kind if isinstance(kind, Fresh) and kind.per_token == per_token else None

    def zeros(self, x: fx.Node) -> bool:
        """Tell whether x is zeros made without a tensor; take these in as a sum."""
        memory = _made_memory(x, self.tokens)
        if x in self.kinds or memory is None or not memory.zero or tensors_read(x):
            return False
        self.kinds[x] = SumOfTokens()
        self.moved[x] = None
        return True

    def counted(self, reader: fx.Node, x: fx.Node, nothing: int) -> None:
        """Note that `reader` sums x over the tokens, where `nothing` adds nothing."""
        if self._not_counted is None:
            return
        signed = fake_value(x).dtype.is_signed
        self._counting.setdefault(x, set()).add(reader)
        while x not in self.row_arguments and self._has(x):
            call = canonical_call(x)
            if call.name not in _SAME_NUMBERS:
                break
            self._counting.setdefault(call.arguments["input"], set()).add(x)
            x = call.arguments["input"]
            signed = signed and fake_value(x).dtype.is_signed
        neutral = self._not_counted.get(x, nothing)
        if x in self.row_arguments and signed and neutral == nothing:
            self._not_counted[x] = nothing
        else:
            self._not_counted = None

    def not_counted(self) -> dict[fx.Node, int] | None:
        """Return, by row argument, a number that adds nothing to any sum.

        None if there is none, or if something else reads it: -1 is no index.
        """
        read = ((u, own) for x, own in self._counting.items() for u in x.users)
        if any(self._has(u) and u not in own for u, own in read):
            return None
        return self._not_counted

    def row_wise(self, node: fx.Node) -> Kinds:
        """Return the kind of a call that DTensor proves to treat all rows alike."""
        inputs = tensors_read(node)
        kinds = {x: self.kinds[x] for x in inputs if x in self.kinds}
        if any(isinstance(kind, CopiedRows) for kind in kinds.values()):
            return self._of_copies(node)
        rows = {x: kind for x, kind in kinds.items() if isinstance(kind, TokenRows)}
        need(len(rows) == len(kinds))
        outside = [x for x in inputs if x not in kinds]
        here = expected(self.tokens)
        orders = {kind.order for kind in rows.values()}
        need(len(orders) <= 1)
        order = next(iter(orders), None)
        if order is None:  # rows of one token may meet
            count = 1
            with_rows = {x for x in outside if self._may_have_rows(x)}
            choices = [set(), with_rows] if rows and with_rows else [with_rows]
        else:
            counts = {kind.per_token for kind in rows.values()}
            need(len(counts) == 1)
            count, choices = counts.pop(), [set()]
        for chosen in choices:
            if keeps_rows(self.flows, node, rows.keys() | chosen, count * here):
                for x in outside:
                    self.rows(x) if x in chosen else self.same(x)
                return _each(
                    fake_value(node),
                    lambda x: TokenRows(times(x.shape[0], self.tokens), order),
                )
        raise NotByRows

    def _of_copies(self, node: fx.Node) -> Kinds:
        """Return the kind of a call on rows that every expert has.

        What it reads from outside is the same for all tokens, or has them as well.
        """
        call, leaves = shaped_call(node)
        roles = [self._tokens_of(x) for x in leaves]
        here = expected(self.tokens)
        flow = self.flows.of(call, roles, here)
        if flow is not None and flow.cut:
            for number, dim in flow.cut.items():
                need(self._from_outside(leaves[number]) == dim)
                roles[number] = dim
            flow = self.flows.of(call, roles, here)
        if flow is None or not (flow.is_local and flow.tensors):
            raise NotByRows
        for x, role in zip(leaves, roles, strict=True):
            if role is None and isinstance(fake_value(x), Tensor):
                self.same(x)
        kinds = [_kind_of(x, here) for x in flow.tensors]
        return kinds[0] if isinstance(fake_value(node), Tensor) else tuple(kinds)

    def _tokens_of(self, x: Any) -> TokenDim | None:
        """Return where an argument has the tokens; None if it is from outside."""
        kind = self.kinds.get(x) if isinstance(x, fx.Node) else None
        if isinstance(kind, CopiedRows):
            return kind.dim
        need(kind in (None, TokenRows(1)))
        return None if kind is None else ROWS

    def _from_outside(self, x: Any) -> TokenDim | None:
        """Return where a value from outside has the tokens.

        It becomes an argument of the region, or is computed again inside of one.
        """
        value = fake_value(x)
        need(isinstance(x, fx.Node) and isinstance(value, Tensor) and value.ndim)
        if x in self.kinds:
            return self._tokens_of(x)
        if times(value.shape[0], self.tokens) == 1:
            self.rows(x)
            return ROWS
        need(x.op in ("call_function", "call_method") and not is_in_place(x))
        (call, leaves), here = shaped_call(x), expected(self.tokens)
        sources = tensors_read(x)
        need(len(sources) == 1)
        role = self._from_outside(sources[0])
        flow = self.flows.of(
            call, [role if y in sources else None for y in leaves], here
        )
        if flow is None or not (flow.is_local and len(flow.tensors) == 1):
            raise NotByRows
        self.kinds[x] = _kind_of(flow.tensors[0], here)
        self.copied[x] = None
        return self._tokens_of(x)

    def _may_have_rows(self, x: fx.Node) -> bool:
        value = fake_value(x)
        if not isinstance(value, Tensor) or not value.ndim:
            return False
        return times(value.shape[0], self.tokens) > 0

    def _has(self, node: fx.Node) -> bool:
        return node in self.moved or node in self.copied

    def _take(self, node: fx.Node) -> None:
        """Make a call part of the region."""
        before = set(self.kinds)
        kind = self._kind(node)
        if is_in_place(node):
            (base, *more) = written_by(node)
            need(not more and node.args[:1] == (base,))
            need(base in before or base in self.moved)
            arguments = (*self.row_arguments, *self.same_arguments)
            need(storage(base) not in {storage(x) for x in arguments})
            self.kinds[base] = kind
        self.kinds[node] = kind
        self.moved[node] = None

    def _copy(self, node: fx.Node) -> None:
        """Compute a value with several rows per token again inside of the region."""
        need(node.op in ("call_function", "call_method") and not is_in_place(node))
        self.kinds[node] = self._kind(node)
        self.copied[node] = None

    def _kind(self, node: fx.Node) -> Kinds:
        try:
            rule = self.rules.get(canonical_call(node).name, DispatchRegion.row_wise)
            return rule(self, node)
        except NotByRows as problem:
            raise NotByRows(str(problem) or f"{node.name} is not") from problem


DispatchRule = Callable[[DispatchRegion, fx.Node], Kinds]
# Calls whose result has the numbers of their input.
_SAME_NUMBERS = (
    "view", "reshape", "flatten", "contiguous", "to", "detach", "clone",
    "repeat_interleave",
)  # fmt: skip


def _made_memory(node: fx.Node, tokens: Size) -> Fresh | None:
    """Return the kind of the memory that a call makes; None for other calls.

    It has 0 rows per token if its first size is no multiple of the tokens.
    """
    value = fake_value(node)
    call = canonical_call(node)
    if call.overload is torch.ops.aten.arange.default:
        return Fresh(times(value.shape[0], tokens), ascending=True)
    names = ("empty", "zeros", "new_empty", "new_zeros", "empty_like", "zeros_like")
    if call.name not in names or not value.ndim:
        return None
    return Fresh(times(value.shape[0], tokens), zero="zeros" in call.name)


def _kind_of(result: Result, tokens: int) -> Kind:
    """Return the kind of a result by where its tokens are."""
    need(isinstance(result.role, TokenDim))
    assert isinstance(result.role, TokenDim)
    if result.role == ROWS and result.shape[0] == tokens:
        return TokenRows(1)
    need(result.shape[result.role.dim] == result.role.outer * tokens)
    return CopiedRows(result.role)


def _is_result(kind: Kinds) -> bool:
    """Tell whether a value of this kind may leave the region."""
    return kind == TokenRows(1) or isinstance(kind, SumOfTokens | Counts)


def _each(value: Any, kind: Any) -> Kinds:
    if isinstance(value, Tensor):
        value_kind: Kind = kind(value)
        return value_kind
    need(isinstance(value, tuple | list))
    return tuple(kind(x) for x in value)


ROWS = TokenDim(0)


def keeps_rows(flows: Flows, node: fx.Node, cut: Set[fx.Node], rows: int) -> bool:
    """Tell whether every result of the call is cut into `rows` rows if `cut` are.

    Rows are along dimension 0; all other operands are the same for all rows, and
    nothing is exchanged: the call may run on the rows that a rank has.
    """
    one_hot = canonical_call(node)
    if one_hot.name == "one_hot" and one_hot.arguments["input"] in cut:
        # With -1 classes it looks for the largest.
        return bool(one_hot.arguments["num_classes"] != -1)
    call, leaves = shaped_call(node)
    roles = [ROWS if isinstance(x, fx.Node) and x in cut else None for x in leaves]
    for value, role in zip(call.values, roles, strict=True):
        if role is not None and not _divides(rows, value):
            return False
    flow = flows.of(call, roles, rows)
    if flow is None or not flow.is_local:
        return False
    return bool(flow.tensors) and all(x.role == ROWS for x in flow.tensors)


def _divides(rows: int, value: Any) -> bool:
    if not isinstance(value, TensorShape) or not value.shape:
        return False
    return value.shape[0] > 0 and value.shape[0] % rows == 0
