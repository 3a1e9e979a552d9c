"""Find where tokens go in calls that change their number or order.

    y = cat([a, x], 1)     dimension 1 of y has the tokens of a and of x
    y = x[:, 1:]           dimension 1 of y has some of the tokens of x
    y = attention(q, k, v) dimension 2 of y has the tokens of q

DTensor's propagation cannot say so, because such calls have to see tokens of other
ranks; it follows from their arguments, which `flow/dim_rules.py` reads for torch's own
calls. Reading them changes nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx
from torch import Tensor

from ...flow.dim_rules import dim_map, kept_dims
from ...flow.view_chain import follow
from ...graph.attention_calls import attention_operands, is_attention, is_flex_attention
from ...graph.calls import canonical_call, spelled
from ...graph.cp_attention import SPLIT_KV, is_cp_attention, operands_of, spec_of
from ...graph.mesh_changes import local_source
from ...graph.mixer_calls import (
    is_mixer,
    mixed_tokens,
    mixer_call,
    mixer_operands,
    result_roles,
)
from ...graph.nodes import fake_value
from ...graph.sequence_tokens import Wanted, wanted_of
from ...placement.scan_calls import joined_operands
from ..mutation.masked_rows import write_rows, write_rows_
from .convolutions import CONVOLUTIONS, convolved, numbers

_OF_TOKENS = (Wanted.OWN_ROWS, Wanted.ALL_ROWS, Wanted.KEY_SOURCE)


@dataclass(frozen=True)
class DimFlow:
    """Dimension `out` of a result has tokens of dimension `dim` of `source`."""

    source: fx.Node
    dim: int
    out: int


def dim_flows(node: fx.Node) -> list[DimFlow] | None:
    """Return all flows into the result of a call; None for calls of any other kind."""
    if is_attention(node):
        return _from_operands(*attention_operands(node))
    if is_cp_attention(node):
        return _from_operands(*operands_of(node))
    if node.target in (write_rows, write_rows_):
        return _all_dims(node.args[0])
    local = local_source(node)
    if local is not None or wanted_of(node) in _OF_TOKENS:
        return _all_dims(local or node.args[0])
    if spelled(node) in NORMS:  # statistics are of all positions, results stay there
        return _all_dims(canonical_call(node).arguments["input"])
    operands = convolved(node)
    if operands is not None:
        return _convolved(node, *operands)
    if node.target is operator.getitem:
        flows = _item(*node.args)  # type: ignore[arg-type]  # a node and an index
        if flows is not None:
            return flows
    table = dim_map(node)
    if table is None or not table.moves:
        return None
    return [DimFlow(*pair) for pair in table.pairs]


def token_operands(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """Return the operands of attention or a mixer, each with its dimension of tokens.

    Where attention is not one call, each operand has a constraint of its own.
    """
    if wanted_of(node) in _OF_TOKENS:
        x, _, dim = node.args
        return [] if dim is None else [(x, dim)]  # type: ignore[list-item]
    if is_mixer(node):
        return mixed_tokens(node)
    if is_attention(node):
        operands: Sequence[Any] = attention_operands(node)
    elif is_cp_attention(node):
        operands = operands_of(node)
        if node.target is SPLIT_KV:  # every rank has all queries
            operands = operands[1:]
        if spec_of(node).whole_keys:  # and here all keys
            operands = operands[:1]
    elif is_flex_attention(node):
        operands = node.args[:3]
    elif spelled(node) == "multi_head_attention_forward":
        arguments = canonical_call(node).arguments
        operands = [arguments[name] for name in ("query", "key", "value")]
        return [(x, 0) for x in operands]  # [tokens, batch, channels]
    else:
        return []
    return [(x, fake_value(x).ndim - 2) for x in operands]


def part_written(node: fx.Node) -> list[DimFlow]:
    """Return the flows from the part to the base of a call `base[index] = part`."""
    if spelled(node) != "setitem":
        return []
    base, index, part = canonical_call(node).arguments.values()
    if not isinstance(part, fx.Node) or not isinstance(fake_value(part), Tensor):
        return []
    assert isinstance(base, fx.Node)
    dim_pairs = kept_dims(index, fake_value(base).ndim)
    if dim_pairs is None:
        return []
    shape = fake_value(part).shape
    missing = 1 + max((out for _, out in dim_pairs), default=-1) - len(shape)
    return [
        DimFlow(part, out - missing, dim)
        for dim, out in dim_pairs
        if out >= missing and shape[out - missing] != 1
    ]


def _from_operands(q: fx.Node, k: fx.Node, v: fx.Node) -> list[DimFlow]:
    """Return the flows into the result of attention.

    Calls of one batch entry and of one head are independent.
    """
    flows = [DimFlow(q, dim, dim) for dim in range(fake_value(q).ndim - 1)]
    return [*flows, DimFlow(k, 0, 0), DimFlow(v, 0, 0)]


def _mixed(mixer: fx.Node, index: int) -> list[DimFlow]:
    """Return the flows into one result of a mixer."""
    dim, name = result_roles(mixer, index)
    flows = (
        [] if dim is None else [DimFlow(x, at, dim) for x, at in mixed_tokens(mixer)]
    )
    operands = mixer_operands(mixer)
    for dims in mixer_call(mixer).mixer.independent.values():
        if name in dims:
            flows += [
                DimFlow(operands[x], at, dims[name])
                for x, at in dims.items()
                if x in operands
            ]
    return flows


def _all_dims(x: Any) -> list[DimFlow]:
    return [DimFlow(x, dim, dim) for dim in range(fake_value(x).ndim)]


def _convolved(node: fx.Node, x: fx.Node, weight: fx.Node) -> list[DimFlow]:
    """Return the flows of a convolution: positions and the batch.

    Positions flow where there are as many as before, but for pads and what is cut.
    """
    before, after = fake_value(x).shape, fake_value(node).shape
    channels = len(after) + 1 - fake_value(weight).ndim
    steps = numbers(node, "stride")
    return [
        DimFlow(x, dim, dim)
        for dim in range(len(after))
        if dim != channels and (before[dim] == after[dim] or steps.get(dim) == 1)
    ]


def _item(source: fx.Node, index: Any) -> list[DimFlow] | None:
    """Return the flows into one of several results."""
    if spelled(source) in _SPLITS:
        return _all_dims(canonical_call(source).arguments["input"])
    if is_cp_attention(source):  # the log-sum-exp has the tokens of the queries too
        return dim_flows(source)
    if is_mixer(source):
        return _mixed(source, index)
    joined = joined_operands(source)
    if joined:  # steps combine entry by entry
        return [flow for x in joined for flow in _all_dims(x)]
    if is_flex_attention(source):
        return _from_operands(*source.args[:3])  # type: ignore[arg-type]  # nodes
    if spelled(source) == "multi_head_attention_forward" and index == 0:
        query = canonical_call(source).arguments["query"]
        return [DimFlow(query, dim, dim) for dim in range(fake_value(query).ndim - 1)]
    return None


_SPLITS = ("split", "chunk", "tensor_split", "split_with_sizes")


NORMS = ("batch_norm", "group_norm", "instance_norm")

OF_POSITIONS = (
    *CONVOLUTIONS,
    *(f"{name}{n}d" for name in ("avg_pool", "max_pool") for n in (1, 2, 3)),
    *(
        f"{name}{n}d"
        for name in ("adaptive_avg_pool", "conv_transpose")
        for n in (1, 2, 3)
    ),
    "interpolate",
    *NORMS,
)
"""Calls that make positions of those of their input, in the same dimensions."""


def rows_before(node: fx.Node, dim: int) -> tuple[fx.Node, int] | None:
    """Return the rows that a call makes rows or tokens of, where it has some."""
    if spelled(node) in OF_POSITIONS:
        return canonical_call(node).arguments["input"], dim
    chain = follow(node)
    source, last = chain[0], chain[-1]
    if source.node is node or dim >= len(last.dims):
        return None
    parts = dict.fromkeys(x.dim for x in last.dims[dim] if x.dim is not None)
    if not parts or (0 in parts and len(parts) > 1):
        return None  # a batch, of windows or of images, is not followed
    return source.node, next(iter(parts))
