"""Warn of calls that run on gathered tensors: once for each line, not of trifles."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch.fx as fx
from torch.distributed.tensor import DTensor

from cpcompile.geometry.tensor_sizes import bytes_of
from cpcompile.logs import warn_once
from cpcompile.torch_private import pytree

from ...graph.context import Context
from ...graph.nodes import fake_value

log = logging.getLogger(__name__)

LEAST_BYTES, LEAST_PART = 2**20, 0.01
"""A call whose operands are below both limits is not worth a word: this number of
bytes, and this part of the bytes that all calls of the graph make."""


def warn_of_gathered_call(
    ctx: Context, node: fx.Node, operands: Any, text: str
) -> None:
    """Warn with `text` of a call, or tell only those who debug.

    operands: values of the call, whose sharded DTensors are gathered.
    """
    sharded = [x for x in pytree.tree_leaves(operands) if _is_sharded(x)]
    matters = bool(sharded) and not _is_trifle(bytes_of(sharded), node.graph.nodes)
    if matters and _is_new_line(ctx, node):
        warn_once(text)
    else:
        log.debug("%s", text)


def _is_trifle(size: int, nodes: Iterable[fx.Node]) -> bool:
    if size >= LEAST_BYTES:
        return False
    computed_bytes = sum(bytes_of(fake_value(x)) for x in nodes if x.op != "output")
    return size < LEAST_PART * computed_bytes


def _is_sharded(x: Any) -> bool:
    """Tell whether ranks have parts of x: neither all of it, nor a summand of all."""
    return isinstance(x, DTensor) and not all(
        placement.is_replicate() or placement.is_partial() for placement in x.placements
    )


def _is_new_line(ctx: Context, node: fx.Node) -> bool:
    """Tell whether no call of this line, in another layer, has been warned of."""
    lines: set[str] = ctx.findings.shared.setdefault("gathering_lines", set())
    line = f"{node.meta.get('stack_trace') or node.name} {node.target}"
    is_new = line not in lines
    lines.add(line)
    return is_new
