"""cp::ring_attention: keys and values travel around the ring, queries stay.

Local view: each rank holds the tokens that a layout gives it, see Note [Layouts], or
runs of them, as the inner ring of cp::hybrid_attention does. The steps are in
ring_steps.py. Method: Liu, Zaharia and Abbeel, Ring Attention (arXiv 2310.01889).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpcompile.ops.attention.contract import (
    check_operands,
    fake_backward,
    fake_forward,
    register_autograd,
)
from cpcompile.ops.attention.ring_steps import Ring, ring_backward, ring_forward
from cpcompile.ops.comm.communication import call_site


@torch.library.custom_op("cp::ring_attention", mutates_args=())
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_len: int,
    kv_len: int,
    is_causal: bool,
    scale: float,
    group: str,
    pieces: int = 1,
    q_size: int | None = None,
    kv_size: int | None = None,
    layout: str = "contiguous",
) -> tuple[Tensor, Tensor]:
    """Attention over a sequence sharded on `group`, by ring exchange.

    Args:
        q: [B, H, local queries, D], this rank's tokens of a sequence of `q_len`.
        k: [B, G, local keys, D], H a multiple of G; tokens of a sequence of `kv_len`.
        v: [B, G, local keys, E].
        q_len, kv_len: lengths of the whole sequences, equal on every rank.
        is_causal: the query at global position p sees the keys at positions <= p.
        scale: factor of the scores.
        group: name of the process group.
        pieces, q_size, kv_size: each rank holds so many runs of so many queries and of
            so many keys, see Runs in layout.py; one chunk each unless given.
        layout: value of the Layout in which queries and keys are dealt to the ranks.

    Returns: out [B, H, local queries, E] in q's dtype and the log-sum-exp of the scaled
    scores [B, H, local queries] in float32 (float64 for float64); rows without any key
    give 0 and -inf.

    Raises: ValueError if the local shapes are not those of the layout, and for another
    layout than contiguous where there are several runs, or causal attention has other
    numbers of keys than of queries.
    """
    runs = (pieces, q_size, kv_size, layout)
    ring = Ring.of(q_len, kv_len, is_causal, group, "forward", *runs)
    operands = (q, k, v, ring.queries, ring.keys, ring.rank)
    check_operands("cp::ring_attention", *operands)
    with call_site(ring.place):
        return ring_forward(q, k, v, scale, ring)


@torch.library.custom_op("cp::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_len: int,
    kv_len: int,
    is_causal: bool,
    scale: float,
    group: str,
    pieces: int = 1,
    q_size: int | None = None,
    kv_size: int | None = None,
    layout: str = "contiguous",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of cp::ring_attention, local and in the inputs' dtypes.

    Saved by the forward: q, k, v, out and lse, nothing per step; sums over steps are
    kept in the accumulation dtype.
    """
    runs = (pieces, q_size, kv_size, layout)
    ring = Ring.of(q_len, kv_len, is_causal, group, "backward", *runs)
    operands = (q, k, v, ring.queries, ring.keys, ring.rank)
    check_operands("cp::ring_attention_backward", *operands)
    with call_site(ring.place):
        return ring_backward(grad, q, k, v, out, lse, scale, ring)


ring_attention.register_fake(fake_forward)
ring_attention_backward.register_fake(fake_backward)
register_autograd(ring_attention, ring_attention_backward)
