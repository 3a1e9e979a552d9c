"""Write what was read of masks into the graph, beside the attention calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.lengths import (
    LengthNotSymbolic,
    guard_region,
    is_same,
    is_symbol,
)
from cpcompile.geometry.masks import Mask
from cpcompile.torch_private.fake_tensors import FakeTensorMode

from ...graph.constant_arguments import Constant
from ...graph.context import AttentionCall, Context
from ...graph.nodes import expected_shape, fake_mode_of, fake_value, insert_call
from .analysis.mask_meaning import MaskMeaning
from .analysis.mask_writer import MaskWriter, cp_constant, cp_constant_until
from .any_length.rewrite_any_length import longest_length
from .erase_masks import drop_mask


def write_causal_limits(ctx: Context, graph: fx.Graph) -> None:
    """Give calls whose scores are changed key ranges in place of is_causal."""
    for number, call in enumerate(ctx.findings.calls):
        if (
            not (call.changes_scores and call.is_causal)
            or call.unsupported
            or call.already_local
        ):
            continue
        node = _causal_limits(call, fake_mode_of(graph))
        drop_mask(call.node, False)
        ctx.findings.calls[number] = replace(call, is_causal=False)
        ctx.findings.masks[ctx.findings.calls[number]] = Mask("causal", key_ranges=node)


def _causal_limits(call: AttentionCall, fake_mode: FakeTensorMode) -> fx.Node:
    """Write key ranges of a causal call; for a symbolic length, part of longer ones."""
    queries, keys = (fake_value(x).shape[-2] for x in (call.q, call.k))
    device = fake_value(call.q).device

    def insert(target: Any, *args: Any) -> fx.Node:
        values = fx.map_arg(args, fake_value)
        with fake_mode:
            value = target(*values)
        return insert_call(call.node.graph, target, args, like=call.node, value=value)

    with call.node.graph.inserting_before(call.node):
        if not (is_symbol(queries) or is_symbol(keys)):
            return insert(cp_constant, Constant(_causal(queries, keys).to(device)))
        if not is_same(queries, keys):
            raise LengthNotSymbolic(f"{call.path} has more keys than queries, or fewer")
        longest = longest_length(queries)
        guard_region(queries, 0, longest + 1)
        ranges = Constant(_causal(longest, longest).to(device))
        size = insert(torch.Tensor.size, call.q, fake_value(call.q).ndim - 2)
        return insert(cp_constant_until, ranges, size, longest, False)


def _causal(queries: int, keys: int) -> Tensor:
    stop = (torch.arange(queries, dtype=torch.int32) + 1).clamp(max=keys)
    return torch.stack([torch.zeros_like(stop), stop], -1).unsqueeze(0)


def meanings(call: AttentionCall) -> str:
    """Return the meanings of the last dimensions of a call's mask."""
    return "BHQK" if len(call.q_shape) == 4 else "BQK"


def write(
    writer: MaskWriter, reading: MaskMeaning, sizes: tuple[int, int, int], like: Tensor
) -> Mask:
    """Write the nodes of a reading at the insertion point.

    like: the value of the mask. Where that has no gradient, its bias has none.
    """
    _, queries, keys = sizes
    bias = None
    if reading.added is not None:
        assert reading.distances is not None, "what is added has a reader"
        bias = reading.distances.write(writer, reading.added)
        if fake_value(bias).requires_grad and not like.requires_grad:
            bias = writer.call(torch.ops.aten.detach.default, bias)
    key_ranges = q_segment_ids = kv_segment_ids = None
    if reading.key_ranges is not None:
        key_ranges = writer.key_ranges(reading.key_ranges, queries)
    if reading.ids is not None:
        q_segment_ids = writer.ids(reading.ids[0], queries)
        kv_segment_ids = writer.ids(reading.ids[1], keys)
    return Mask(reading.text, key_ranges, q_segment_ids, kv_segment_ids, bias)


def fits(call: AttentionCall) -> bool:
    """Tell whether torch would broadcast a mask without making q larger."""
    shape = expected_shape(fake_value(call.mask))
    whole = (*call.q_shape[:-1], call.k_shape[-2])
    return len(shape) <= len(whole) and all(
        n in (1, m) for n, m in zip(reversed(shape), reversed(whole), strict=False)
    )
