"""Note, while AOTAutograd traces, what part of each product a rank computes.

    mm(x [S, D], w [D, F]), x sharded on S      ->  mm(x [S / N, D], w [D, F])   share N
    mm(x [S, D], w [D, F]), both replicated     ->  mm(x [S, D], w [D, F])       share 1

The share is what one device computes for the call over what this rank computes. It is
noted on the nodes of the local calls that DTensor makes of a call on whole tensors,
forward and backward. So whatever the partitioner of AOTAutograd does with these, such
as computing them again, is done to their shares as well. What is traced on plain
tensors every rank computes as one device does: its share is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.tensor import DTensor

from cpcompile.accounting.flops import (
    counted_targets,
    flops_of,
    flops_of_node,
    has_formula,
    operator_of,
)
from cpcompile.ops.dtensor.shares import ranks_on_other_axes
from cpcompile.ops.traced_nodes import (
    SHARE,
    shares_counted_in,
    traced_nodes,
)
from cpcompile.torch_private import pytree

Handler = Callable[..., Any]


@contextmanager
def shares_noted(group: str) -> Iterator[None]:
    """Note shares among the ranks of a group in what is traced inside of the block."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    before = {op: handlers.get(op) for op in counted_targets()}
    handlers |= {op: _noting(op, handler) for op, handler in before.items()}
    try:
        with shares_counted_in(group):
            yield
    finally:
        for op, handler in before.items():
            handlers.pop(op, None)
            if handler is not None:
                handlers[op] = handler


def _noting(op: Any, handler: Handler | None) -> Handler:
    def call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with traced_nodes() as nodes:
            run = _by_dtensor if handler is None else handler
            result = run(op, args, kwargs)
        counted = [node for node in nodes if has_formula(operator_of(node))]
        if counted:
            whole = flops_of(op, args, kwargs, result) / _on_other_axes(result)
            own = sum(map(flops_of_node, counted))
            for node in counted:
                node.meta[SHARE] = whole / own if own else 1.0
        return result

    return call


def _by_dtensor(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the call without a handler of ours."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = handler


def _on_other_axes(result: Any) -> int:
    tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, DTensor)]
    if not tensors:
        return 1
    return ranks_on_other_axes(tensors[0].device_mesh, tensors[0].placements)
