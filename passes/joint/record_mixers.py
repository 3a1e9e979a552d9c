"""Have the backward of a mixer use what its forward has recorded.

    mixer = cp.mixer([q, k], call)
    mixer_backward = cp.mixer_backward([grad], [q, k], [0], [0, 1], call)
      ->
    mixer = cp.mixer_recorded([q, k], [0, 1], call)  # and copies of q and k, a token
    mixer_backward = cp.mixer_backward([grad], [q', k'], [0], [0, 1], call, token)

Without it the backward runs the function again. In a region of a checkpoint the
partitioner copies the forward into the backward, and drops the first one's token.
Copies are recorded, because compilers write to memory that they need no more. If the
operands of the backward are others (moved, computed again), the function runs again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from cpcompile.torch_private.operators import OpOverload

from ..graph.graph_pass import graph_pass
from ..graph.nodes import value_of

_NODE = "node"
_MIXER = torch.ops.cp.mixer.default
_RECORDED = torch.ops.cp.mixer_recorded.default
_BACKWARD = torch.ops.cp.mixer_backward.default


@graph_pass()
def record_mixers(graph: fx.Graph, ctx: object) -> int:
    """Record the mixers whose backward is in the graph; return how many."""
    backwards = graph.find_nodes(op="call_function", target=_BACKWARD)
    if not backwards:  # as in an evaluation
        return 0
    forwards: dict[Any, fx.Node] = {}
    numbers = _value_numbers(graph)
    for node in graph.find_nodes(op="call_function", target=_MIXER):
        tensors, call = node.args
        forwards.setdefault((_numbered(tensors, numbers), call), node)
    count = 0
    for node in backwards:
        _, read, _, needed, call = node.args
        forward = forwards.pop((_numbered(read, numbers), call), None)
        if forward is None:  # a second backward of one forward
            continue
        if not any(x.args[1] == 0 for x in forward.users):
            continue  # it gives a state alone, as a summary: its inside is not kept
        _record(forward, node, needed)
        count += 1
    return count


def _record(forward: fx.Node, backward: fx.Node, needed: Any) -> None:
    """Rewrite both calls, and save what the backward reads."""
    forward.target = _RECORDED
    operands: Any = forward.args[0]
    _set_args(forward, lambda tensors, call: (tensors, needed, call))
    added = [x.new_empty(x.shape) for x in map(value_of, operands)]
    added.append(added[0].new_empty(1, dtype=torch.int64, device="cpu"))
    first = len(value_of(forward))
    forward.meta["val"] = [*value_of(forward), *added]
    items = []
    with forward.graph.inserting_after(forward):
        for i, value in enumerate(added):
            item = forward.graph.call_function(operator.getitem, (forward, first + i))
            item.meta = {**forward.meta, "val": value}
            item.meta.pop("eager_input_vals", None)
            item.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
            items.append(item)
    *copies, token = items
    _set_args(backward, lambda grads, _, *args: (grads, copies, *args, token))


def _value_numbers(graph: fx.Graph) -> dict[fx.Node, int]:
    """Give each node a number, which is that of others that compute the same.

    DTensor cuts a parameter once for the forward and once for the backward.
    """
    numbers: dict[fx.Node, int] = {}
    first_of: dict[Any, int] = {}
    for node in graph.nodes:
        key: Any = node
        if _is_function_of_arguments(node.target):
            key = node.target, _numbered((node.args, node.kwargs), numbers)
        numbers[node] = first_of.setdefault(key, len(first_of))
    return numbers


def _is_function_of_arguments(target: Any) -> bool:
    """Tell whether a call gives the same each time."""
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    is_random = torch.Tag.nondeterministic_seeded in target.tags
    return not (target._schema.is_mutable or is_random)


def _numbered(arguments: Any, numbers: dict[fx.Node, int]) -> str:
    """Return arguments as text, with the numbers of nodes."""
    return repr(fx.map_arg(arguments, lambda x: (_NODE, numbers[x])))


def _set_args(node: fx.Node, change: Callable[..., tuple[Any, ...]]) -> None:
    """Change the arguments of a call, and what Inductor is told that they were."""
    node.args = change(*node.args)
    if "eager_input_vals" in node.meta:
        args, kwargs = node.meta["eager_input_vals"]
        values = fx.map_arg(change(*args), value_of)
        node.meta["eager_input_vals"] = values, kwargs
