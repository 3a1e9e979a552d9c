"""Hide the keys of the padding from attention that would see them."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.fx as fx

from cpcompile.geometry.masks import Mask
from cpcompile.ops.attention_spec import is_of_positions

from ...graph.context import AttentionCall
from ...graph.nodes import fake_value
from ..masks.analysis.mask_writer import longest_value
from .padded_graph import PaddedGraph
from .sizes import Unproved


def hide_keys(graph: PaddedGraph, call: AttentionCall) -> None:
    """Let no query of the tokens see a key of the padding.

    No query of a causal call does: the padding is after it.
    """
    masks = graph.ctx.findings.masks
    mask = masks.get(call)
    if call.is_causal and mask is None:
        return
    bias = None if mask is None else mask.bias
    if bias is not None and not is_of_positions(fake_value(bias)):
        raise Unproved("a bias of pairs is added to its scores")
    if mask is not None and mask.key_ranges is not None and _is_causal(mask.key_ranges):
        return
    masks[call] = _with_padding(graph, mask, call)


def _is_causal(key_ranges: fx.Node) -> bool:
    """Tell whether key ranges are known and end at the query, for all lengths."""
    value = longest_value(key_ranges)
    if value is None:
        return False
    rows = torch.arange(1, value.shape[1] + 1, device=value.device)
    return bool((value[..., 1] <= rows).all())


def _with_padding(graph: PaddedGraph, mask: Mask | None, call: AttentionCall) -> Mask:
    at = call.node
    if mask is None or mask.kv_segment_ids is None:
        positions = graph.vector(at.graph, "positions")
        zeros = graph.call(at, torch.zeros_like, positions)
        q_ids = kv_ids = graph.call(at, torch.unsqueeze, zeros, 0)
    else:
        assert mask.q_segment_ids is not None
        q_ids, kv_ids = mask.q_segment_ids, mask.kv_segment_ids
    # No query has the id -1.
    valid = graph.vector(at.graph, "valid")
    hidden = graph.call(at, torch.where, valid, kv_ids, -1)
    graph.fixes += 1
    text = "key padding" if mask is None else f"{mask.text}, key padding"
    base_mask = mask or Mask(text)
    assert fake_value(hidden).dtype == fake_value(kv_ids).dtype
    return replace(base_mask, text=text, q_segment_ids=q_ids, kv_segment_ids=hidden)
