"""Keep masks that cannot be read as a function of positions as biases of all pairs.

    scores, topk, scatter [2, 1, 16, 16] -> scaled_dot_product_attention(.., attn_mask)
      ->  masks: Mask(bias [2, 1, 16, 16], unread=Unread("scatter is computed ..."))

Note [Masks that cannot be read]
No mask is refused because of its cost: strict is about equality. What computes a mask
stays where it is, with all that it reads and writes, so that it is exact whatever it
does. Where its values are plain, every rank computes all of it, as it does with all
that is plain; random numbers are equal, because the ranks have one state of the
generator. Where it is computed from sharded values, DTensor decides: the scores of an
indexer are sharded along its queries, and so are topk and scatter of them. The operator
of the call cuts what lies whole on every rank, which sends nothing.

The cut then sinks through the calls that are proved to treat each row alike
(joint/tiling/sink_slices), so that no rank makes all pairs. Where a mask that
`is_large` stays whole, it counts as memory of its call, and one warning states its
bytes (whole/attention_nodes).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.lengths import LengthNotSymbolic, is_symbol
from cpcompile.geometry.masks import Mask, Unread

from ...graph.attention_calls import is_attention
from ...graph.calls import canonical_call
from ...graph.context import AttentionCall, Context, InputKind
from ...graph.nodes import fake_value, insert_call, reached, sub_graph
from .analysis.mask_meaning import dense_text
from .analysis.mask_program import resolve
from .write_masks import meanings

LEAST_LIMIT = 16 * 2**20  # bytes; what no rank will miss
_OF_TOKENS = (InputKind.FULL, InputKind.DTENSOR, InputKind.KEPT)


def is_large(size: int, call: AttentionCall, ctx: Context) -> bool:
    """Tell whether a mask of `size` bytes is too large to be whole on every rank.

    The limit is a share of what a rank holds of q, k, v and the result, and at least
    LEAST_LIMIT.
    """
    if size <= LEAST_LIMIT:
        return False
    rows, keys = (torch.Size(x[:-1]).numel() for x in (call.q_shape, call.k_shape))
    head_dim, value_dim = call.q_shape[-1], int(fake_value(call.v).shape[-1])
    elements = (rows + keys) * (head_dim + value_dim)
    held = elements * call.dtype.itemsize / ctx.ranks
    return size > ctx.whole_mask_share * held


def mask_bytes(call: AttentionCall) -> int:
    """Return the bytes of the mask as the model has it.

    Raises: LengthNotSymbolic if a size of it is a symbol.
    """
    value = fake_value(call.mask)
    if any(map(is_symbol, value.shape)):
        raise LengthNotSymbolic(f"the attn_mask of {call.path} is one of all pairs")
    return int(value.numel()) * int(value.element_size())


def unread_mask(
    call: AttentionCall,
    ctx: Context,
    reason: str,
    outer: dict[fx.Node, fx.Node],
) -> Mask:
    """Keep a mask as it is: a bias in four dimensions, with a row for every query."""
    assert call.mask is not None
    size = mask_bytes(call)
    unread = Unread(
        reason,
        size,
        is_large=is_large(size, call, ctx),
        is_whole=not follows_tokens(call.mask, ctx, outer),
    )
    text = dense_text(fake_value(call.mask))
    return Mask(text, bias=bias_of(call), unread=unread)


def bias_of(call: AttentionCall) -> fx.Node:
    """Write a mask as it is: a bias in four dimensions, with a row for every query."""
    node = call.mask
    assert node is not None
    value = fake_value(node)
    with call.node.graph.inserting_before(call.node):
        while value.ndim < 4:
            dim = 1 if meanings(call) == "BQK" and value.ndim == 3 else 0
            value = value.unsqueeze(dim)
            node = _insert(call, torch.unsqueeze, (node, dim), value)
        shape = (*map(int, value.shape[:2]), call.q_shape[-2], call.k_shape[-2])
        if tuple(value.shape) == shape:
            return node
        return _insert(call, torch.Tensor.expand, (node, shape), value.expand(shape))


def _insert(call: AttentionCall, target: Any, args: Any, value: Tensor) -> fx.Node:
    return insert_call(call.node.graph, target, args, like=call.node, value=value)


def follows_tokens(mask: fx.Node, ctx: Context, outer: dict[fx.Node, fx.Node]) -> bool:
    """Tell whether a mask is seen to be computed from values that are sharded.

    These are floats of inputs that have tokens, embeddings, and results of attention or
    of checkpoint regions.
    """
    made_of = reached([mask], lambda x: resolve(x, outer).all_input_nodes)
    return any(_brings_tokens(resolve(x, outer), ctx) for x in made_of)


def _brings_tokens(node: fx.Node, ctx: Context) -> bool:
    value = fake_value(node)
    floats = isinstance(value, Tensor) and value.is_floating_point()
    if node.op == "placeholder":
        graph_input = ctx.inputs.get(node)
        return floats and graph_input is not None and graph_input.kind in _OF_TOKENS
    if is_attention(node) or sub_graph(node) is not None:
        return True
    return floats and canonical_call(node).name == "embedding"
