"""cp::ulysses_attention: every rank attends with some heads over the whole sequence.

    q, k, v -> cp::ulysses_scatter -> attention of aten -> cp::ulysses_gather -> out

The operator is a composition of these, also for autograd, so that a compiled graph has
them and nothing else, and attention is the vendor's kernel. Method: Jacobs et al.,
DeepSpeed Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from cpcompile.geometry.layout import Chunks
from cpcompile.geometry.lengths import in_chunks
from cpcompile.kernels.choice import why_no_flash
from cpcompile.ops.attention.contract import check_operands
from cpcompile.ops.comm.communication import group_by_name
from cpcompile.ops.comm.head_exchange import with_exchanged_heads
from cpcompile.ops.dtensor.composite import define_composite, on_local_parts
from cpcompile.ops.steps.aten_flash import flash_forward, flash_operands, is_empty


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_len: int,
    kv_len: int,
    is_causal: bool,
    scale: float,
    group: str,
) -> Tensor:
    """Attention over a sequence sharded on `group`, by exchange of heads.

    Arguments and errors are those of cp::ring_attention, for any number of heads; q, k
    and v may be DTensors, which are brought to the layout that is needed.

    Returns: out [B, H, local queries, E] in q's dtype; rows without any key are 0.
    """

    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pg = group_by_name(group)
        queries, keys = (
            Chunks(in_chunks(length, x.shape[2], pg.size()), pg.size())
            for length, x in ((q_len, q), (kv_len, k))
        )
        name = "cp::ulysses_attention"
        check_operands(name, q, k, v, queries, keys, pg.rank())
        return with_exchanged_heads(
            lambda q, k, v: attend_heads(q, k, v, is_causal, scale),
            *(q, k, v, (queries.length, keys.length), (queries.size, keys.size), group),
        )

    return on_local_parts(local, q, k, v, group)


define_composite(
    "ulysses_attention(Tensor q, Tensor k, Tensor v, SymInt q_len, SymInt kv_len, "
    "bool is_causal, float scale, str group) -> Tensor",
    ulysses_attention,
)


def attend_heads(
    q_BHRD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor, is_causal: bool, scale: float
) -> Tensor:
    """Plain attention of whole sequences by aten, differentiable: [B, H, R, E].

    The kernel is aten's flash attention on a CPU, and on a GPU what PyTorch prefers for
    the call; where there is none of these, matrix products that hold all scores.
    """
    value_dim, device = v_BGKE.shape[-1], q_BHRD.device.type
    dim = max(q_BHRD.shape[-1], value_dim)
    no_flash = why_no_flash(device, q_BHRD.dtype, dim)
    if is_empty(q_BHRD, k_BGKD) or (device == "cpu" and no_flash is not None):
        return _scaled_dot_product(q_BHRD, k_BGKD, v_BGKE, is_causal, scale)
    if device == "cpu":
        return flash_forward(q_BHRD, k_BGKD, v_BGKE, is_causal, scale)[0]
    q_BHRD, k_BGKD, v_BGKE = flash_operands(q_BHRD, k_BGKD, v_BGKE)
    group = q_BHRD.shape[1] // k_BGKD.shape[1]
    if no_flash is not None and group > 1:  # the other kernels take no groups
        k_BGKD = k_BGKD.repeat_interleave(group, 1)
        v_BGKE = v_BGKE.repeat_interleave(group, 1)
    out_BHRD = _scaled_dot_product(q_BHRD, k_BGKD, v_BGKE, is_causal, scale)
    if out_BHRD.shape[-1] > value_dim:
        out_BHRD = out_BHRD.narrow(-1, 0, value_dim)
    return out_BHRD


def _scaled_dot_product(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )
