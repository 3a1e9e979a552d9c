"""What a mask says, as a function of positions: integers per token, not pairs.

attn_mask [2, 1, 4096, 4096], computed by 40 nodes
  ->  Mask(limits=[1, 4096, 2], text="causal, window 8")
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees, and what is added to its scores.

    The fields are nodes of the graph in which the attention call stands, or None. All
    but `bias` are plain tensors, whole and the same on every rank; positions are those
    of the whole sequences, in their order. A key is visible if limits, ids and a bool
    bias all say so; a query that sees no key gives 0.

    limits: int32 [B or 1, Sq, 2]; row i sees keys j with
        limits[b, i, 0] <= j < limits[b, i, 1].
    q_ids, k_ids: integers [B or 1, Sq] and [B or 1, Sk]; row i sees key j only if
        they are equal. Padding has k_ids -1; q_ids are never negative. Both or none.
    bias: [B or 1, H or 1, Sq, Sk]; bool: True is visible; floating: added to the scaled
        scores, and may need a gradient. It is the one thing that is sharded, on Sq.
    text: "causal, window 8", "causal, same document", "dense bool [2, 1, 37, 37]".
    """

    text: str
    limits: fx.Node | None = None
    q_ids: fx.Node | None = None
    k_ids: fx.Node | None = None
    bias: fx.Node | None = None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes that hold what the mask says."""
        fields = (self.limits, self.q_ids, self.k_ids, self.bias)
        return tuple(node for node in fields if node is not None)
