"""Find how much of a graph's work is shared out, and which lines repeat it.

    mm(x [S, D], w [D, F]), x sharded on S      ->  mm(x [S / N, D], w [D, F])   share N
    mm(x [S, D], w [D, F]), both replicated     ->  mm(x [S, D], w [D, F])       share 1

The share is what one device computes for a call over what this rank computes. While
AOTAutograd traces, it is noted on the nodes of the local calls that DTensor makes of a
call on whole tensors, forward and backward. So whatever the partitioner of AOTAutograd
does with these, such as computing them again, is done to their shares as well. What is
traced on plain tensors every rank computes as one device does: its share is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch.fx as fx
from torch.distributed.tensor import DTensor

from cpcompile.accounting.counted_calls import calls_of, line_of
from cpcompile.accounting.flops import (
    counted_targets,
    flops_of,
    flops_of_node,
    has_formula,
    is_unknown,
    operator_of,
    tokens_share,
)
from cpcompile.accounting.graph_account import Line, LineWork, Work, grouped, total
from cpcompile.geometry.tensor_sizes import bytes_of
from cpcompile.ops.dtensor.shares import ranks_on_other_axes
from cpcompile.ops.traced_nodes import SHARE, shares_counted_in, traced_nodes
from cpcompile.passes.graph.nodes import module_path
from cpcompile.torch_private import pytree
from cpcompile.torch_private.distributed import by_dtensor

Shares = dict[int, float]
"""Shares of calls, by the number that autograd gives a call and its gradient alike."""


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


def _noting(op: Any, handler: Callable[..., Any] | None) -> Callable[..., Any]:
    def call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with traced_nodes() as nodes:
            result = (handler or by_dtensor)(op, args, kwargs)
        counted = [node for node in nodes if has_formula(operator_of(node))]
        if counted:
            whole = flops_of(op, args, kwargs, result) / _on_other_axes(result)
            own = sum(map(flops_of_node, counted))
            for node in counted:
                node.meta[SHARE] = whole / own if own else 1.0
        return result

    return call


def _on_other_axes(result: Any) -> int:
    for x in pytree.tree_leaves(result):
        if isinstance(x, DTensor):
            return ranks_on_other_axes(x.device_mesh, x.placements)
    return 1


def work_of(
    module: fx.GraphModule,
    ranks: int,
    shares: Shares,
    planned: Collection[Line] = (),
) -> Work:
    """Return the work of a graph.

    shares: those of the forward's calls; shares of this graph's calls are added.
    planned: lines whose work every rank does because a plan says so.
    """
    rows: list[LineWork] = []
    uncounted: dict[str, None] = {}
    # Where nothing needs gradients, all calls of a graph have the same number.
    of_forward = dict(shares)
    for node in calls_of(module):
        if not has_formula(operator_of(node)):
            if is_unknown(node.target):
                uncounted[str(node.target).removesuffix(".default")] = None
            continue
        line, flops = line_of(node), float(flops_of_node(node))
        row = LineWork(
            line=line,
            what=module_path(node),
            calls=1,
            flops=flops,
            whole_flops=flops * _share(node, shares, of_forward),
            planned=line in planned,
            bytes=bytes_of([x.meta["val"] for x in (node, *node.all_input_nodes)]),
        )
        rows.append(row)
    lines = [total(x) for x in grouped(rows, lambda row: row.line)]
    repeated = [x for x in lines if x.repeated_flops(ranks) > 0.01 * x.whole_flops]
    return Work(
        flops=sum(x.flops for x in rows),
        whole_flops=sum(x.whole_flops for x in rows),
        ranks=ranks,
        repeated=tuple(sorted(repeated, key=lambda x: -x.repeated_flops(ranks))),
        uncounted=tuple(uncounted),
    )


def _share(node: fx.Node, shares: Shares, of_forward: Shares) -> float:
    number = node.meta.get("seq_nr")
    share = node.meta.get(SHARE)
    if share is None:
        share = of_forward.get(number, 1.0) if number is not None else 1.0
    elif number is not None:
        shares.setdefault(number, share)
    return float(share) * tokens_share(node)
