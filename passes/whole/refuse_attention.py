"""Refuse attention over shared tokens that is none of ours, as a mask beside is_causal.

It would run on all tokens, on every rank. Attention by hand, or of operands without
batch and heads, is left to its calls, which DTensor shares out by rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.fx as fx

from cpcompile.errors import RewriteError
from cpcompile.logs import warn_once, warn_unsharded
from cpcompile.ops.plain_attention import plain_attention
from cpcompile.ops.shared_mixers import SPLIT_ALONG

from ..graph.attention_calls import attention_operands
from ..graph.context import AttentionCall, Context
from ..graph.nodes import all_nodes, fake_mode_of, fake_value
from ..model.attention.find_attention import unplanned_calls
from ..model.tokens.sequence_dims import SequenceDims

_DIMS = 4  # batch, heads, tokens, head dim


def refuse_attention(graph: fx.Graph, ctx: Context) -> None:
    """Warn of such calls, or raise RewriteError for one over a sharded sequence."""
    left = [
        call
        for node, call in unplanned_calls(ctx).items()
        if node.target is not plain_attention and len(call.q_shape) == _DIMS
    ]
    for call in left:
        assert call.unsupported is not None, "it is not planned for a reason"
        message = (
            f"attention at {call.path} (node {call.node.name}): {call.unsupported}"
        )
        if not any(_shared(graph, ctx, call)):
            warn_unsharded(f"attention at {call.path}", call.unsupported)
        elif ctx.strict:
            raise RewriteError(message)
        else:
            warn_once(f"{call.node.name} runs on gathered tensors, because {message}")


def _shared(graph: fx.Graph, ctx: Context, call: AttentionCall) -> Iterator[bool]:
    """Tell of each value that has tokens whether those of a call are its own.

    These are inputs that are sharded, and values in which tokens begin.
    """
    operands = attention_operands(call.node)
    tokens = [(x, fake_value(x).ndim - 2) for x in operands]
    on = fake_mode_of(graph), ctx.mesh, ctx.axis
    dims = SequenceDims(graph, tokens, *on)
    for node, known in ctx.inputs.items():
        at = known.placements[ctx.axis] if known.placements else None
        dim = getattr(at, "dim", known.dim)
        if dim is not None:
            yield any(x.dim.dim == dim for x in dims.found.get(node, ()))
    for node in all_nodes(graph):
        if node.target is SPLIT_ALONG:
            yield any(x.dim.dim == node.args[2] for x in dims.found.get(node, ()))
