"""Find how much of a graph's work is shared out, and which lines repeat it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

import torch.fx as fx

from cpcompile.accounting.flops import (
    flops_of_node,
    has_formula,
    is_unknown,
    operator_of,
    tokens_share,
)
from cpcompile.accounting.graph_account import Line, LineWork, Work
from cpcompile.accounting.lines import calls_of, line_of
from cpcompile.geometry.tensor_sizes import bytes_of
from cpcompile.ops.traced_nodes import SHARE
from cpcompile.passes.graph.nodes import module_path

Shares = dict[int, float]
"""Shares of calls, by the number that autograd gives a call and its gradient alike."""


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
    own = whole = 0.0
    lines: dict[Line, LineWork] = {}
    uncounted: dict[str, None] = {}
    # Where nothing needs gradients, all calls of a graph have the same number.
    of_forward = dict(shares)
    for node in calls_of(module):
        if not has_formula(operator_of(node)):
            if is_unknown(node.target):
                uncounted[str(node.target).removesuffix(".default")] = None
            continue
        share = _share(node, shares, of_forward)
        flops = float(flops_of_node(node))
        own, whole = own + flops, whole + flops * share
        new = LineWork(
            line=line_of(node),
            what=module_path(node),
            calls=1,
            flops=flops,
            whole_flops=flops * share,
            planned=line_of(node) in planned,
            bytes=bytes_of([x.meta["val"] for x in (node, *node.all_input_nodes)]),
        )
        before = lines.get(new.line)
        lines[new.line] = new if before is None else _added(before, new)
    repeated = tuple(_repeated(lines.values(), ranks))
    return Work(own, whole, ranks, repeated, tuple(uncounted))


def _share(node: fx.Node, shares: Shares, of_forward: Shares) -> float:
    number = node.meta.get("seq_nr")
    share = node.meta.get(SHARE)
    if share is None:
        share = of_forward.get(number, 1.0) if number is not None else 1.0
    elif number is not None:
        shares.setdefault(number, share)
    return float(share) * tokens_share(node)


def _added(before: LineWork, new: LineWork) -> LineWork:
    return replace(
        before,
        calls=before.calls + new.calls,
        flops=before.flops + new.flops,
        whole_flops=before.whole_flops + new.whole_flops,
        bytes=before.bytes + new.bytes,
    )


def _repeated(lines: Iterable[LineWork], ranks: int) -> list[LineWork]:
    """Return the lines whose work all ranks together repeat, most of it first."""
    repeated = [x for x in lines if x.repeated_flops(ranks) > 0.01 * x.whole_flops]
    return sorted(repeated, key=lambda x: -x.repeated_flops(ranks))
