"""Cut the operand of a product that widens it, in place of the product's result.

    logits = linear(hidden, weight)  # [B, S, V] from [B, S, D]
    shifted = logits.float()[..., :-1, :]
      ->
    shifted = linear(hidden[:, :-1], weight).float()

Losses of the next token cut logits. If nothing else reads these, the tokens that change
their rank by the cut may as well be cut while they are D numbers wide, not V. Between
product and loss there is no movement then, so that they run in tiles together; and of
`logits[:, -1:]` only what is read is computed. Where the cut ends may be a symbol, such
as the length of the completions in GRPO.

Every call from the product to the cut treats each token by itself, and the product
makes at least twice as many numbers as it reads of the tokens. Left alone: views in
between, dropout, a cut of the last dimension, slices by tensors.

Legend: B batch, S tokens, D width, V vocabulary.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...flow.widening_product import WidenedValue
from ...graph.calls import canonical_call, function_of
from ...graph.context import Context
from ...graph.graph_pass import graph_pass
from ...graph.nodes import fake_mode_of, fake_value, insert_call


@dataclass(frozen=True)
class _Cut:
    """Which entries of dimension `dim` are kept; bounds may be numbers of the graph."""

    dim: int
    kept: slice

    @property
    def numbers(self) -> list[fx.Node]:
        """Return the bounds that the graph computes."""
        bounds = (self.kept.start, self.kept.stop, self.kept.step)
        return [x for x in bounds if isinstance(x, fx.Node)]

    def index(self, dim: int) -> tuple[slice, ...]:
        """Return the index that keeps these entries of another dimension."""
        return (*[slice(None)] * dim, self.kept)


@graph_pass()
def cut_before_products(graph: fx.Graph, ctx: Context) -> int:
    """Move cuts before products that widen what is cut; return how many values."""
    moved = 0
    for node in reversed(list(graph.nodes)):
        cuts = [_cut(user, node) for user in node.users]
        if not cuts or cuts[0] is None or any(cut != cuts[0] for cut in cuts):
            continue
        widened = WidenedValue.of(node, cuts[0].dim, _is_read_by_these)
        if widened is None:
            continue
        numbers = _numbers_after(widened.calls[0], cuts[0].numbers)
        if numbers is not None:
            for number in numbers:
                widened.calls[0].prepend(number)
            _move(widened, cuts[0])
            moved += 1
    if moved:
        graph.lint()
    return moved


def _is_read_by_these(node: fx.Node, calls: Collection[fx.Node]) -> bool:
    return _is_plain(node) and all(user in calls for user in node.users)


def _numbers_after(call: fx.Node, numbers: list[fx.Node]) -> list[fx.Node] | None:
    """Return what has to be computed before a call for it to read numbers, in order.

    None if a tensor is among it.
    """
    late = set[fx.Node]()
    waiting = [x for x in numbers if call < x]
    while waiting:
        number = waiting.pop()
        if number.op != "call_function" or not _is_number(fake_value(number)):
            return None
        late.add(number)
        waiting += [x for x in number.all_input_nodes if call < x and x not in late]
    return sorted(late)


def _cut(node: fx.Node, source: fx.Node) -> _Cut | None:
    """Return the cut of a value that a call is: one slice of one dimension, no more."""
    if not node.args or node.args[0] is not source or not _is_plain(source):
        return None
    call = canonical_call(node)
    if call.name == "narrow":
        start, length = call.arguments["start"], call.arguments["length"]
        if not isinstance(start, int) or not isinstance(length, int) or start < 0:
            return None  # their sum would be a call of its own
        dim, ndim = call.arguments["dim"], fake_value(source).dim()
        return _Cut(dim % ndim, slice(start, start + length))
    if call.name != "getitem":
        return None
    index = call.arguments["index"]
    items = index if isinstance(index, tuple) else (index,)
    if any(not isinstance(x, slice) and x is not Ellipsis for x in items):
        return None
    cutting = [i for i, x in enumerate(items) if x not in (slice(None), Ellipsis)]
    if len(cutting) != 1:
        return None
    kept = items[cutting[0]]
    bounds = (kept.start, kept.stop, kept.step)
    if any(x is not None and not _is_number(fake_value(x)) for x in bounds):
        return None
    at = cutting[0]
    if Ellipsis in items[:at]:
        at += fake_value(source).dim() - len(items)
    return _Cut(at, kept)


def _is_number(value: object) -> bool:
    return isinstance(value, int | torch.SymInt)


def _is_plain(node: fx.Node) -> bool:
    value = fake_value(node)
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def _move(widened: WidenedValue, cut: _Cut) -> None:
    """Cut what the calls read, and not their last result."""
    value, read = widened.calls[-1], widened.read
    graph, entries = value.graph, dict[fx.Node, fx.Node]()
    with fake_mode_of(graph), torch.set_grad_enabled(fake_value(value).requires_grad):
        for node in widened.calls:
            for operand in node.all_input_nodes:
                if operand not in read:
                    continue
                if operand not in entries:
                    index = cut.index(read[operand])
                    with graph.inserting_before(node):
                        entries[operand] = insert_call(
                            graph,
                            operator.getitem,
                            (operand, index),
                            like=node,
                            value=fake_value(operand)[fx.map_arg(index, fake_value)],
                        )
                node.replace_input_with(operand, entries[operand])
            args, kwargs = fx.map_arg((node.args, node.kwargs), fake_value)
            node.meta["example_value"] = function_of(node)(*args, **kwargs)
    for user in list(value.users):
        user.replace_all_uses_with(value, propagate_meta=False)
        graph.erase_node(user)
