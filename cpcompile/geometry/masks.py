"""A mask as a function of positions: integers per token, not pairs.

attn_mask [2, 1, 4096, 4096], computed by 40 nodes
  ->  Mask(key_ranges=[1, 4096, 2], text="causal, window 8")
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx


@dataclass(frozen=True)
class Unread:
    """The reason why a mask could not be read, and what it costs.

    bytes: the size of the mask as the model has it. is_large: whether that is more than
    is to be whole on every rank. is_whole: whether it is whole there, as far as is
    known.
    """

    reason: str
    bytes: int
    is_large: bool
    is_whole: bool


@dataclass(frozen=True)
class Mask:
    """The keys that each query sees, and what is added to its scores.

    The fields are nodes of the graph in which the attention call stands, or None. All
    but `bias` are plain tensors, whole and the same on every rank; positions are those
    of the whole sequences, in their order. A key is visible if key ranges, segment ids
    and a bool bias all say so; a query that sees no key gives 0.

    key_ranges: int32 [B or 1, Sq, 2]; row i sees keys j with
        key_ranges[b, i, 0] <= j < key_ranges[b, i, 1].
    q_segment_ids, kv_segment_ids: integers [B or 1, Sq] and [B or 1, Sk]; row i sees
        key j only if they are equal. Padding has kv_segment_ids -1; q_segment_ids are
        never negative. Both or none.
    bias: [B or 1, H or 1, Sq, Sk]; bool: True is visible; floating: added to the scaled
        scores, and may need a gradient. It is the one thing that is sharded, on Sq.
        Of positions: [B or 1, H or 1, Sk] or [B or 1, H or 1, Sq + Sk - 1], floating,
        whole; the entry of key j, or of key - query = d at d + Sq - 1, is added.
    text: "causal, window 8", "causal, same document", "dense bool [2, 1, 37, 37]".
    unread: given for a mask that is a bias because it could not be read.
    """

    text: str
    key_ranges: fx.Node | None = None
    q_segment_ids: fx.Node | None = None
    kv_segment_ids: fx.Node | None = None
    bias: fx.Node | None = None
    unread: Unread | None = None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """Nodes that hold the fields of the mask."""
        fields = (self.key_ranges, self.q_segment_ids, self.kv_segment_ids, self.bias)
        return tuple(node for node in fields if node is not None)
