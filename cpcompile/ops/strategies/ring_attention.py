"""cp::ring_attention: keys and values travel around the ring, queries stay.

Local view: each rank holds the tokens that a layout gives it, see Note [Layouts], or
runs of them, as the inner ring of cp::hybrid_attention does. The steps are in
ring_steps.py. Method: Liu, Zaharia and Abbeel, Ring Attention (arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cpcompile.ops.attention_spec import AttentionInputs
from cpcompile.ops.comm.communication import call_site
from cpcompile.ops.strategies.contract import Saved, register
from cpcompile.ops.strategies.ring_schedule import Ring
from cpcompile.ops.strategies.ring_steps import ring_backward, ring_forward


@torch.library.custom_op("cp::ring_attention", mutates_args=())
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Sequence[Tensor],
    sizes: Sequence[int],
    spec: str,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Attend over a sequence sharded on `group`, by ring exchange.

    Args:
        q: [B, H, local queries, D], this rank's tokens of a sequence of q_len.
        k: [B, G, local keys, D], H a multiple of G; tokens of a sequence of kv_len.
        v: [B, G, local keys, E].
        extras: the tensors that the spec names, see AttentionInputs.
        sizes: q_len and kv_len, the lengths of the whole sequences, equal on every
            rank. There may follow pieces, q_size and kv_size: each rank holds `pieces`
            runs of `q_size` queries and of `kv_size` keys, see Runs in layout.py; else
            it is one chunk each.
        spec: the text of an AttentionSpec.
        group: name of the process group.

    Returns: out [B, H, local queries, E] in q's dtype and the log-sum-exp of the scaled
    scores [B, H, local queries] in float32 (float64 for float64); rows without any key
    give 0 and -inf.

    Raises: ValueError if the local shapes are not those of the layout, and for another
    layout than contiguous where there are several runs, or causal attention has other
    numbers of keys than of queries; for masks that are not these, with is_causal (which
    key ranges say), or in a layout that they do not allow.
    """
    ring = Ring.of(AttentionInputs.of(spec, extras), sizes, group, "forward")
    ring.check("cp::ring_attention", q, k, v)
    with call_site(ring.place):
        return ring_forward(q, k, v, ring)


def _gradients(
    saved: Saved, inputs: AttentionInputs, sizes: Sequence[int], group: str, *how: Any
) -> tuple[Tensor, ...]:
    """Compute the gradients of cp::ring_attention.

    The forward has saved its tensors and results, nothing per step; sums over steps are
    kept in the accumulation dtype.
    """
    ring = Ring.of(inputs, sizes, group, "backward")
    ring.check("cp::ring_attention_backward", *saved[1:4])
    with call_site(ring.place):
        return ring_backward(*saved, ring, *how)


ring_attention_backward = register(ring_attention, _gradients)
