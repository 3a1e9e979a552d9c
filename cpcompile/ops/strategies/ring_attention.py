"""cp::ring_attention: keys and values travel around the ring, queries stay.

Local view: each rank holds the tokens that a layout gives it, see Note [Layouts], or
runs of them, as the inner ring of cp::hybrid_attention does. The steps are in
ring_steps.py. Method: Liu, Zaharia and Abbeel, Ring Attention (arXiv 2310.01889).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpcompile.ops.comm.communication import call_site
from cpcompile.ops.step.row_mask import MaskOperands
from cpcompile.ops.strategies.contract import register
from cpcompile.ops.strategies.ring_schedule import Ring
from cpcompile.ops.strategies.ring_steps import ring_backward, ring_forward


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
    bias: Tensor | None = None,
    key_ranges: Tensor | None = None,
    q_segment_ids: Tensor | None = None,
    kv_segment_ids: Tensor | None = None,
    known: str = "",
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seeds: Tensor | None = None,
    score_mod: str = "",
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend over a sequence sharded on `group`, by ring exchange.

    Args:
        q: [B, H, local queries, D], this rank's tokens of a sequence of `q_len`.
        k: [B, G, local keys, D], H a multiple of G; tokens of a sequence of `kv_len`.
        v: [B, G, local keys, E].
        q_len, kv_len: lengths of the whole sequences, equal on every rank.
        is_causal: the query at global position p sees the keys at positions <= p.
        scale: factor of the scores.
        group: name of the process group.
        pieces, q_size, kv_size: each rank holds `pieces` runs of `q_size` queries and
            of `kv_size` keys, see Runs in layout.py; one chunk each unless given.
        layout: value of the Layout in which queries and keys are dealt to the ranks;
            under a mask contiguous, or zigzag without a bias of pairs.
        bias: [B or 1, H or 1, local queries, kv_len], bool (True is visible) or added
            to the scaled scores; -inf and the lowest finite number hide a key. Or added
            and of positions, whole and the same on every rank: [B or 1, H or 1, kv_len]
            by key, or [B or 1, H or 1, q_len + kv_len - 1] by distance, from key -
            query = 1 - q_len on.
        key_ranges: [B or 1, q_len, 2], integers: query i sees the keys at positions
            key_ranges[b, i, 0] <= j < key_ranges[b, i, 1].
        q_segment_ids, kv_segment_ids: [B or 1, q_len] and [B or 1, kv_len], integers: a
            query sees the keys with its own id. Key ranges and segment ids are in the
            order of the sequence, whole and the same on every rank, in any layout. A
            query sees a key if key ranges, segment ids and a bool bias all say so.
        known: the name of these key ranges and segment ids in known_masks.py, if they
            are kept.
        softcap: c > 0 makes c * tanh(s / c) of the scaled scores s, before a bias.
        dropout_p: weights are dropped with this probability.
        seeds: [B, H], integers; which weights are dropped is a function of them and of
            the positions of query and key.
        score_mod: the text of a function of scores, see score_mod.py. Then the bias is
            [1, 1, n], the values that it reads, whole and the same on every rank.
        sinks: [H], a score that takes part in the softmax of every row of its head, and
            has no value.

    Returns: out [B, H, local queries, E] in q's dtype and the log-sum-exp of the scaled
    scores [B, H, local queries] in float32 (float64 for float64); rows without any key
    give 0 and -inf.

    Raises: ValueError if the local shapes are not those of the layout, and for another
    layout than contiguous where there are several runs, or causal attention has other
    numbers of keys than of queries; for masks that are not these, with is_causal (which
    key ranges say), or in a layout that they do not allow.
    """
    fields = (bias, key_ranges, q_segment_ids, kv_segment_ids)
    changes = (softcap, dropout_p, seeds)
    masks = MaskOperands.of(fields, known, *changes, score_mod=score_mod)
    runs = (pieces, q_size, kv_size, layout)
    ring = Ring.of(q_len, kv_len, is_causal, group, "forward", *runs, masks)
    ring.check("cp::ring_attention", q, k, v)
    with call_site(ring.place):
        return ring_forward(q, k, v, scale, ring, sinks)


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
    bias: Tensor | None = None,
    key_ranges: Tensor | None = None,
    q_segment_ids: Tensor | None = None,
    kv_segment_ids: Tensor | None = None,
    known: str = "",
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seeds: Tensor | None = None,
    score_mod: str = "",
    bias_grad: bool = False,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients (dq, dk, dv, dbias) of cp::ring_attention.

    They are in the inputs' dtypes. The forward has saved its tensors and results,
    nothing per step; sums over steps are kept in the accumulation dtype. dbias has the
    shape of the bias, and no elements unless `bias_grad`. grad_lse: [B, H, local
    queries], of the log-sum-exp, if it has a gradient.
    """
    fields = (bias, key_ranges, q_segment_ids, kv_segment_ids)
    changes = (softcap, dropout_p, seeds)
    masks = MaskOperands.of(fields, known, *changes, score_mod=score_mod)
    runs = (pieces, q_size, kv_size, layout)
    ring = Ring.of(q_len, kv_len, is_causal, group, "backward", *runs, masks)
    ring.check("cp::ring_attention_backward", q, k, v)
    with call_site(ring.place):
        return ring_backward(grad, q, k, v, out, lse, scale, ring, bias_grad, grad_lse)


register(ring_attention, ring_attention_backward)
