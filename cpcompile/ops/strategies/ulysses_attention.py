"""cp::ulysses_attention: every rank attends with some heads over the whole sequence.

    q, k, v -> cp::ulysses_scatter -> attention of aten -> cp::ulysses_gather -> out

The operator is a composition of these, also for autograd, so that a compiled graph has
them and nothing else, and attention is the vendor's kernel. Method: Jacobs et al.,
DeepSpeed Ulysses (arXiv 2309.14509).

With `head_groups` in the spec heads are exchanged a few at a time, see
heads_in_groups.py.

Under a mask attention is cp::local_attention, of whole sequences on one rank. Key
ranges and segment ids are whole on every rank as it is. A bias with heads goes with
them; one without, which all heads read, goes to all ranks as a key head does that all
query heads read, so that its gradients are summed on the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cpcompile.geometry.head_split import HeadSplit
from cpcompile.geometry.layout import Chunks, Runs
from cpcompile.geometry.lengths import in_chunks
from cpcompile.kernels.choice import why_no_flash
from cpcompile.ops.attention_spec import AttentionInputs, is_of_positions
from cpcompile.ops.comm.communication import group_by_name
from cpcompile.ops.comm.head_exchange import Results, ulysses_scatter
from cpcompile.ops.comm.heads_in_groups import with_heads_in_groups
from cpcompile.ops.dtensor.composite import define_composite, on_local_parts
from cpcompile.ops.dtensor.mask_placements import OF_HEADS
from cpcompile.ops.step.aten_flash import flash_forward, flash_operands, is_empty
from cpcompile.ops.strategies.contract import (
    Saved,
    check_inputs,
    check_layout,
    check_operands,
    register,
)
from cpcompile.ops.strategies.ring_schedule import Ring
from cpcompile.ops.strategies.ring_steps import ring_backward, ring_forward


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Sequence[Tensor],
    sizes: Sequence[int],
    spec: str,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Attend over a sequence sharded on `group`, by exchange of heads.

    Arguments and errors are those of cp::ring_attention, for any number of heads;
    tensors may be DTensors, which are brought to the layout that is needed.

    Returns: out [B, H, local queries, E] in q's dtype; rows without any key are 0. And
    the log-sum-exp, as cp::ring_attention does, if the spec wants it; else no elements.
    """
    name, (q_len, kv_len) = "cp::ulysses_attention", sizes

    def local(q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> Results:
        check_layout(name, inputs.spec.layout)
        pg = group_by_name(group)
        queries, keys = (
            Chunks(in_chunks(length, x.shape[2], pg.size()), pg.size())
            for length, x in ((q_len, q), (kv_len, k))
        )
        check_operands(name, q, k, v, queries, keys, pg.rank())
        is_causal, scale = inputs.spec.is_causal, inputs.spec.scale
        plain = not (inputs.tensors or inputs.spec.wants_lse)
        if inputs.has_modifiers:
            plain = False
            check_inputs(name, q, inputs, (q_len, kv_len))
        elif is_causal and not plain:
            ranges = causal_ranges(queries.length, q)
            given = replace(inputs.spec, is_causal=False)
            inputs = replace(inputs, spec=given, key_ranges=ranges)
        exchange = (queries.length, queries.size, group)
        own = inputs_of_own_heads(inputs, q.shape[1], *exchange)

        def attend(q: Tensor, k: Tensor, v: Tensor, first: int) -> Results:
            if plain:
                return attend_heads(q, k, v, is_causal, scale), None
            out: Tensor
            lse: Tensor
            some = inputs_of_some_heads(own, first, q.shape[1])
            out, lse = local_attention(q, k, v, *some.arguments())
            return out, lse if own.spec.wants_lse else None

        lengths, chunks = (queries.length, keys.length), (queries.size, keys.size)
        sent = (q, k, v, lengths, chunks, group)
        return with_heads_in_groups(attend, *sent, inputs.spec.head_groups)

    return on_local_parts(local, (q, k, v), AttentionInputs.of(spec, extras), group)


define_composite("ulysses_attention", ulysses_attention)


def inputs_of_own_heads(
    inputs: AttentionInputs, heads: int, length: int, size: int, group: str
) -> AttentionInputs:
    """Return the inputs of this rank's heads; a bias has the rows of all of `group`.

    Those of OF_HEADS are those of these heads, and so is a bias of positions. A bias of
    pairs becomes [B or 1, heads per rank or 1, length, S], from [B or 1, H or 1, local
    queries, S]; rank r has the r-th chunk of `size` of the `length` rows. Queries say
    how heads are split in an exchange; here they are empty.
    """
    pg, bias = group_by_name(group), inputs.bias
    per_rank = HeadSplit(heads, heads, pg.size()).per_rank

    def own_heads(x: Tensor | None) -> Tensor | None:
        if x is None:  # heads are the last dimension
            return None
        padded = F.pad(x, (0, per_rank * pg.size() - heads))
        return padded.narrow(-1, per_rank * pg.rank(), per_rank)

    of_heads: dict[str, Any] = {x: own_heads(getattr(inputs, x)) for x in OF_HEADS}
    inputs = replace(inputs, **of_heads)
    if inputs.spec.score_mod:
        first = per_rank * pg.rank()
        spec = replace(inputs.spec, first_head=first, last_head=heads - 1)
        return replace(inputs, spec=spec)
    if bias is None or (is_of_positions(bias) and bias.shape[1] == 1):
        return inputs
    if is_of_positions(bias):
        by_head = own_heads(bias.mT)
        assert by_head is not None, "of a bias that is there"
        return replace(inputs, bias=by_head.mT)
    is_bool = bias.dtype == torch.bool
    rows = bias.to(torch.uint8) if is_bool else bias
    no_queries = rows.new_empty((rows.shape[0], heads, rows.shape[2], 0))
    own_rows: Tensor
    _, own_rows = ulysses_scatter([no_queries, rows], [length] * 2, [size] * 2, group)
    return replace(inputs, bias=own_rows.to(torch.bool) if is_bool else own_rows)


def inputs_of_some_heads(
    inputs: AttentionInputs, first: int, count: int
) -> AttentionInputs:
    """Return the inputs of `count` heads of a rank, from the `first` one on."""

    def cut(x: Tensor | None, dim: int) -> Tensor | None:
        if x is None or x.shape[dim] == count:
            return x
        return x.narrow(dim, first, count)

    spec, bias = inputs.spec, inputs.bias
    if spec.score_mod:
        spec = replace(spec, first_head=spec.first_head + first)
    elif bias is not None and bias.shape[1] > 1:
        bias = cut(bias, 1)
    of_heads = {x: cut(getattr(inputs, x), dims[1]) for x, dims in OF_HEADS.items()}
    return replace(inputs, spec=spec, bias=bias, **of_heads)


def causal_ranges(length: int, like: Tensor) -> Tensor:
    """Return a causal limit as key ranges, int32 [1, length, 2].

    They are made of `like`: what a factory function makes is a constant while a graph
    is traced.
    """
    stop = like.new_ones(length, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return torch.stack([torch.zeros_like(stop), stop], -1).unsqueeze(0)


def attend_heads(
    q_BHRD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor, is_causal: bool, scale: float
) -> Tensor:
    """Compute plain attention of whole sequences by aten, differentiable: [B, H, R, E].

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


@torch.library.custom_op("cp::local_attention", mutates_args=())
def local_attention(
    q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], spec: str
) -> tuple[Tensor, Tensor]:
    """Attend over whole sequences under a mask, on one rank.

    Arguments, results and errors are those of cp::ring_attention on one rank.
    """
    inputs = AttentionInputs.of(spec, extras)
    ring = _one_rank("cp::local_attention", (q, k, v), inputs)
    return ring_forward(q, k, v, ring)


def _gradients(saved: Saved, inputs: AttentionInputs, *how: Any) -> tuple[Tensor, ...]:
    ring = _one_rank("cp::local_attention_backward", saved[1:4], inputs)
    return ring_backward(*saved, ring, *how)


def _one_rank(
    name: str, operands: tuple[Tensor, Tensor, Tensor], inputs: AttentionInputs
) -> Ring:
    """Check the operands, and return a ring that sends nothing."""
    check_layout(name, inputs.spec.layout)
    queries, keys = (Runs.contiguous(x.shape[2], 1) for x in operands[:2])
    check_operands(name, *operands, queries, keys, 0)
    check_inputs(name, operands[0], inputs, (queries.length, keys.length))
    return Ring(queries, keys, False, "", 0, name, inputs=inputs)


local_attention_backward = register(local_attention, _gradients)
