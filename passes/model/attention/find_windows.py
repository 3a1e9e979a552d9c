"""Find attention within windows of tokens, which ranks share out as they lie.

    x: [B, 64, C], sharded along 1
    y = x.view(B, 2, 4, 2, 4, C).permute(0, 1, 3, 2, 4, 5).reshape(B * 4, 16, C)
    scaled_dot_product_attention(q, k, v)           q: [B * 4, H, 16, D], of y
      ->  AttentionCall(already_local="its tokens are in windows, ...")

Where the tokens of an input end in the batch of an attention call, and not in its
sequence, every rank has whole windows: rows of a grid, frames, blocks. Such a call
needs no message. It would be taken for attention over a sequence of 16 tokens. Not for
programs for many lengths.
"""

from __future__ import annotations

from dataclasses import replace

import torch.fx as fx

from ...graph.attention_calls import attention_operands, is_attention
from ...graph.context import IN_WINDOWS, AttentionCall, Context
from ..tokens.dim_group import DimGroup
from ..tokens.mixed_sequence import MixedSequence, computes, dim_size, find_sequences


def find_windows(graph: fx.Graph, ctx: Context) -> None:
    """Leave the attention calls alone that are within windows."""
    inputs = dict(find_sequences(graph, ctx, of_calls=False))
    lengths = {dim_size(x, dim) for x, dim in inputs.items()}
    calls = [c for c in ctx.findings.calls if _may_be(c, lengths)]
    if not calls or ctx.length is not None:
        return
    walk = _Walk(MixedSequence(graph, ctx, min(lengths), {}))
    for node, dim in inputs.items():
        walk.follow(node, dim.dim)
    for call in calls:
        if call.node in walk.windows:
            place = ctx.findings.calls.index(call)
            ctx.findings.calls[place] = replace(call, already_local=IN_WINDOWS)


def _may_be(call: AttentionCall, lengths: set[int]) -> bool:
    """Tell whether a call attends to fewer tokens than an input has."""
    if call.unsupported or call.already_local or not lengths:
        return False
    return max(call.q_shape[-2], call.k_shape[-2]) < max(lengths)


class _Walk:
    """A walk ahead from inputs: where their tokens, or windows of these, are.

    windows: attention calls that have them in their batch.
    """

    def __init__(self, sequence: MixedSequence) -> None:
        self.sequence = sequence
        self.windows: set[fx.Node] = set()
        self._classes: dict[fx.Node, DimGroup] = {}

    def follow(self, node: fx.Node, dim: int) -> None:
        """Follow a dimension of a value as far as its entries keep apart."""
        waiting = [self._begin(node, dim)]
        while waiting:
            value = waiting.pop()
            for user in value.users:
                if user not in self._classes:
                    waiting += self._ahead(user, value)

    def _begin(self, node: fx.Node, dim: int) -> fx.Node:
        self._classes[node] = self.sequence.class_ahead(node, dim)
        return node

    def _ahead(self, user: fx.Node, value: fx.Node) -> list[fx.Node]:
        """Return the values of a call that have entries of an operand."""
        entries = self._classes[value]
        if is_attention(user):
            return self._attended(user, entries)
        if not computes(user):
            return []
        found = self.sequence.consumers_of(entries, value, user) or []
        self._classes |= {x: c for c, x in found}
        return [x for _, x in found]

    def _attended(self, node: fx.Node, entries: DimGroup) -> list[fx.Node]:
        classes = [self._classes.get(x) for x in attention_operands(node)]
        places = {
            (c.entries, c.dims[x]) if c is not None else None
            for c, x in zip(classes, attention_operands(node), strict=True)
        }
        if len(places) > 1 or None in places:
            return []  # until all three have them
        ((_, place),) = (x for x in places if x is not None)
        if place.dim == 0:
            self.windows.add(node)
        entries.dims[node] = place
        self._classes[node] = entries
        return [node]
