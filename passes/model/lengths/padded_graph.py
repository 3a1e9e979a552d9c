"""Keep what is known of a padded graph, ask where tokens go, and hide the padding.

    cross_entropy(logits, labels)  ->  cross_entropy(logits, where(valid, labels, -100))
    mean(x, 1)                     ->  div(sum(where(valid, x, 0), 1), real)
    x[:, -1]                       ->  sum(where(position == real - 1, x, 0), 1)
    x[:, -5:]                      ->  index_select(x, 1, arange(-5, 0) + real)

valid is arange(P) < real, and real the number of tokens without the padding.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.lengths import expected
from cpcompile.torch_private import pytree
from cpcompile.torch_private.fake_tensors import FakeTensorMode

from ...flow.flow import Flow, Flows, Role
from ...flow.shaped_calls import ShapedCall, without_data
from ...graph.calls import canonical_call, function_of
from ...graph.checkpoint_regions import Regions
from ...graph.context import Context
from ...graph.effects import is_in_place
from ...graph.nodes import all_nodes, fake_mode_of, fake_value, insert_call
from ...graph.sequence_tokens import Padding, TokenAxis, TokenDim, Tokens
from .sizes import Found, Sizes, Unproved

_VIEWS = {
    "view", "reshape", "flatten", "contiguous", "unsqueeze", "squeeze", "transpose",
    "permute", "mT", "numpy_T", "t",
}  # fmt: skip
_LOW = (torch.bfloat16, torch.float16)


class PaddedGraph:
    """A graph of P tokens and its checkpoint regions.

    found: what is known of each value that was read so far. writes: its calls in place.
    fixes: how often the padding was hidden.
    """

    def __init__(self, graph: fx.Graph, ctx: Context, padding: Padding) -> None:
        self.graph, self.ctx, self.padding = graph, ctx, padding
        self.sizes, self.regions = Sizes(padding.symbol), Regions(graph)
        self.found: dict[fx.Node, Found] = {}
        self.writes = [n for n in all_nodes(graph) if writes(n)]
        self.fixes = 0
        self._device = fake_value(padding.real).device
        self._flows = Flows(FakeTensorMode(), self._device.type)
        self._fake_mode = fake_mode_of(graph)
        self._vectors: dict[tuple[fx.Graph, str, int], fx.Node] = {}

    def tokens(self, x: Any) -> Tokens | None:
        """Return the tokens of a value; None if it has none."""
        tokens = self.found.get(x) if isinstance(x, fx.Node) else None
        return tokens if isinstance(tokens, Tokens) else None

    # Where tokens go.

    def flow(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        sizes: tuple[int, int] = (1, 1),
    ) -> Flow | None:
        """Return the flow of the tokens in a call, or None where they meet.

        sizes: the outer and the inner size of every axis, to ask of all entries of the
            dimensions as of tokens.

        Raises: Unproved, if its operands have different numbers of tokens.
        """
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        roles: list[Role] = []
        for t in map(self.tokens, leaves):
            at = None if t is None else TokenDim(t.axis.dim, t.axis.outer // sizes[0])
            roles.append(at)
        call = ShapedCall(function, [without_data(x) for x in leaves], spec)
        entries = self._count(self._extra(leaves)) * math.prod(sizes)
        return self._flows.of(call, roles, entries)

    def _count(self, extra: int) -> int:
        return expected(self.padding.symbol) + extra

    def _extra(self, leaves: list[Any]) -> int:
        extras = {t.extra for x in leaves if (t := self.tokens(x))}
        if len(extras) != 1:
            raise Unproved("tokens of different lengths meet")
        return extras.pop()

    def by_token(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Found:
        """Return the tokens of the results of a call that computes each by itself.

        Raises: Unproved, if the call is not known to do so.
        """
        leaves = pytree.tree_leaves((args, kwargs))
        axes = [t.axis for x in leaves if (t := self.tokens(x))]
        axis_sizes = {(axis.outer, axis.inner) for axis in axes}
        # Some rules of DTensor know no dimension of which a rank has several pieces.
        for way in dict.fromkeys(
            [(1, 1), *(axis_sizes if len(axis_sizes) == 1 else ())]
        ):
            flow = self.flow(function, args, kwargs, way)
            if flow is not None and not (
                flow.cut or flow.cuts_inside or flow.ends_sums
            ):
                return self._tokens_of(flow, self._extra(leaves), *way)
        name = getattr(function, "__name__", function)
        raise Unproved(f"{name} lets the tokens meet, as far as is known")

    def _tokens_of(self, flow: Flow, extra: int, outer: int, inner: int) -> Found:
        entries = self._count(extra) * outer * inner
        tokens: list[Tokens | None] = []
        for result in flow.results:
            if result is None:
                tokens.append(None)
                continue
            if not isinstance(result.role, TokenDim):
                raise Unproved("a result is not that of each token")
            dim, before = result.role.dim, result.role.outer
            after = result.shape[dim] // (before * entries)
            axis = TokenAxis(dim, before * outer, after * inner)
            tokens.append(Tokens(axis, extra))
        return tokens[0] if flow.spec.is_leaf() else tuple(tokens)

    def node_by_token(self, node: fx.Node) -> Found:
        """Return the tokens of a node whose call computes each by itself."""
        return self.by_token(function_of(node), *node.args, **node.kwargs)

    def flow_of(self, node: fx.Node) -> Flow | None:
        """Return the flow of the tokens in a call of the graph."""
        return self.flow(function_of(node), node.args, node.kwargs)

    # What hides the padding.

    def call(
        self, before: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> fx.Node:
        """Insert a call in front of `before`, on whose behalf it is made."""
        value = self.run(target, args, kwargs)
        with before.graph.inserting_before(before):
            return insert_call(
                before.graph, target, args, like=before, value=value, kwargs=kwargs
            )

    def run(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the value of a call of nodes."""
        fake_args, fake_kwargs = fx.map_arg((args, kwargs), fake_value)
        with self._fake_mode:
            return target(*fake_args, **fake_kwargs)

    def replace(self, node: fx.Node, new: fx.Node) -> None:
        """Let all readers read another value, which has no tokens."""
        node.replace_all_uses_with(new)
        node.graph.erase_node(node)
        self.found[new] = None

    def vector(self, graph: fx.Graph, kind: str, extra: int = 0) -> fx.Node:
        """Return a value of the lengths, which is made after the inputs of a graph.

        kind: "real", the number of tokens without the padding; "positions", all of them
        with the padding; "valid", a bool for each.
        """
        key = (graph, kind, extra)
        if key in self._vectors:
            return self._vectors[key]
        length, real = (
            self.regions.bring_in(x, graph)
            for x in (self.padding.length, self.padding.real)
        )
        anchor = next(n for n in graph.nodes if n.op != "placeholder")
        if kind == "real":
            vector = self.call(anchor, torch.add, real, extra) if extra else real
        elif kind == "positions":
            size = self.call(anchor, operator.add, length, extra) if extra else length
            vector = self.call(anchor, torch.arange, size, device=self._device)
        else:
            positions = self.vector(graph, "positions", extra)
            limit = self.vector(graph, "real", extra)
            anchor = max(positions, limit).next
            vector = self.call(anchor, torch.lt, positions, limit)
        self._vectors[key] = vector
        return vector

    def count(self, at: fx.Node, tokens: Tokens, factor: int = 1) -> fx.Node:
        """Return the number of entries of tokens without the padding, times `factor`.

        It is a tensor without dimensions, which makes no other dtype of a number that
        it is combined with.
        """
        real = self.vector(at.graph, "real", tokens.extra)
        factor *= tokens.axis.outer * tokens.axis.inner
        return real if factor == 1 else self.call(at, torch.mul, real, factor)

    def hidden(self, at: fx.Node, node: fx.Node, number: Any) -> fx.Node:
        """Return `node` with a number in the padding, for a reader `at`.

        The number is put in before tokens and batch are made one dimension, where it
        can be: DTensor would gather such a dimension.
        """
        tokens = self.found[node]
        assert isinstance(tokens, Tokens)
        source = self._viewed(node, tokens)
        if source is not None:
            filled = self.hidden(at, source, number)
            call = (node.args, dict(node.kwargs))
            args, kwargs = fx.map_arg(call, lambda x: filled if x is source else x)
            again = self.call(at, function_of(node), *args, **kwargs)
            self.found[again] = tokens
            return again
        valid = self.vector(at.graph, "valid", tokens.extra)
        mask = self._along(at, valid, tokens, fake_value(node).dim())
        new = self.call(at, torch.where, mask, node, number)
        self.found[new] = tokens
        self.fixes += 1
        return new

    def _viewed(self, node: fx.Node, tokens: Tokens) -> fx.Node | None:
        """Return what a view of tokens that are not alone in a dimension is a view of.

        None for any other value, and where something is written: a view may be a copy.
        """
        if tokens.is_whole or self.writes or canonical_call(node).name not in _VIEWS:
            return None
        sources = [x for x in node.all_input_nodes if self.tokens(x)]
        return sources[0] if len(sources) == 1 else None

    def hide(self, at: fx.Node, node: fx.Node, number: Any) -> None:
        """Let `at` read a number in the padding of an operand."""
        at.replace_input_with(node, self.hidden(at, node, number))

    def _along(
        self, at: fx.Node, vector: fx.Node, tokens: Tokens, dims: int
    ) -> fx.Node:
        """Reshape one number per token so that it broadcasts over all dimensions."""
        axis = tokens.axis
        if not tokens.is_whole:
            length = self.call(at, torch.Tensor.size, vector, 0)
            vector = self.call(at, torch.reshape, vector, [1, -1, 1])
            sizes = [axis.outer, length, axis.inner]
            vector = self.call(at, torch.Tensor.expand, vector, sizes)
        elif dims == 1:
            return vector
        shape = [1] * axis.dim + [-1] + [1] * (dims - axis.dim - 1)
        return self.call(at, torch.reshape, vector, shape)

    def from_the_end(
        self, at: fx.Node, node: fx.Node, back: int, several: bool
    ) -> fx.Node:
        """Return the token `back` before the end of the real ones, or all from it on.

        Raises: Unproved, if the tokens are not alone in their dimension.
        """
        tokens, value = self.found[node], fake_value(node)
        assert isinstance(tokens, Tokens)
        if not tokens.is_whole or (value.dtype == torch.bool and not several):
            raise Unproved("it reads tokens at the end")
        self.fixes += 1
        limit, dim = self.vector(at.graph, "real", tokens.extra), tokens.axis.dim
        if several:  # there are enough
            last = self.call(at, torch.arange, -back, 0, device=value.device)
            index = self.call(at, torch.add, last, limit)
            return self.call(at, torch.index_select, node, dim, index)
        wanted = self.call(at, torch.sub, limit, back)
        positions = self.vector(at.graph, "positions", tokens.extra)
        here = self.call(at, torch.eq, positions, wanted)
        mask = self._along(at, here, tokens, value.dim())
        alone = self.call(at, torch.where, mask, node, 0)
        return self.call(at, torch.sum, alone, [dim], dtype=value.dtype)

    def average(
        self,
        at: fx.Node,
        hidden: fx.Node,
        dims: Sequence[int],
        keepdim: bool = False,
        dtype: torch.dtype | None = None,
    ) -> fx.Node:
        """Insert the average over dimensions of what is 0 in the padding."""
        value, tokens = fake_value(hidden), self.found[hidden]
        assert isinstance(value, Tensor) and isinstance(tokens, Tokens)
        wanted = dtype or value.dtype
        exact = torch.float32 if wanted in _LOW else wanted
        factor = math.prod(int(value.shape[d]) for d in dims if d != tokens.axis.dim)
        count = self.count(at, tokens, factor)
        sum_options = {"keepdim": True} if keepdim else {}
        total = self.call(at, torch.sum, hidden, dims, **sum_options, dtype=exact)
        mean = self.call(at, torch.div, total, count)
        return mean if exact is wanted else self.call(at, torch.Tensor.to, mean, wanted)


def writes(node: fx.Node) -> bool:
    """Tell whether a node is a call in place."""
    return node.op in ("call_function", "call_method") and is_in_place(node)
