"""cp::attention_step under a mask: local queries meet one chunk of a ring's keys.

A mask is summarized once, by cp::mask_summary; each step computes what it leaves of one
chunk. Which tokens lie where arrives as integers, see RingPlace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property

import torch
from torch import Tensor

from cpcompile.geometry.layout import Layout, Runs
from cpcompile.geometry.mask_blocks import size_of_look, spans
from cpcompile.ops.attention_spec import AttentionInputs, is_of_positions
from cpcompile.ops.step.masked_gradients import MaskedGradients
from cpcompile.ops.step.masked_steps import (
    MaskedRows,
    MaskSummary,
    TokenSpans,
    summarize_mask,
    tile_of,
)
from cpcompile.ops.step.math_attention import accumulation_dtype
from cpcompile.ops.step.online_softmax import RunningAttention
from cpcompile.ops.step.row_mask import may_be_raised

_LAYOUTS = tuple(Layout)


@dataclass(frozen=True)
class RingPlace:
    """One rank of a ring, and which tokens all of its ranks hold."""

    queries: Runs
    keys: Runs
    layout: Layout
    rank: int

    def to_list(self) -> list[int]:
        """Return the integers that operators take."""
        layout = _LAYOUTS.index(self.layout)
        return [*astuple(self.queries), *astuple(self.keys), layout, self.rank]

    @classmethod
    def of_list(cls, numbers: Sequence[int]) -> RingPlace:
        """Undo to_list."""
        *runs, layout, rank = numbers
        return cls(Runs(*runs[:4]), Runs(*runs[4:]), _LAYOUTS[layout], rank)

    @cached_property
    def places(self) -> TokenSpans:
        """The tokens of all ranks, as spans."""
        rows, keys = (
            tuple(spans(self.layout, runs, each) for each in range(runs.ranks))
            for runs in (self.queries, self.keys)
        )
        lengths = self.queries.length, self.keys.length
        return TokenSpans(rows, keys, self.rank, lengths)


@torch.library.custom_op("cp::mask_summary", mutates_args=())
def mask_summary(
    q: Tensor,
    v: Tensor,
    extras: Sequence[Tensor],
    place: Sequence[int],
    spec: str,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Summarize a mask once, for all steps of a ring: the fields of a MaskSummary.

    Args:
        q, v: of the ring; their values are not read.
        extras, spec: of cp::ring_attention.
        place: a RingPlace as integers.
        bias_grad: whether the backward wants the gradient of the bias.
    """
    inputs, ring = AttentionInputs.of(spec, extras), RingPlace.of_list(place)
    seen = summarize_mask(q, v, inputs, ring.places, bias_grad)
    return seen.lower, seen.upper, seen.table, seen.raised


@mask_summary.register_fake
def _(
    q: Tensor,
    v: Tensor,
    extras: Sequence[Tensor],
    place: Sequence[int],
    spec: str,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs, ring = AttentionInputs.of(spec, extras), RingPlace.of_list(place)
    batch = max(1 if x is None else x.shape[0] for x in inputs.masks[1:])
    bound = q.new_empty((batch, q.shape[2]), dtype=torch.int64)
    size = 0
    if not inputs.spec.mask_key:
        places, tile = ring.places, tile_of(q, v, inputs, bias_grad)
        size = size_of_look(places.rows, places.keys, places.rank, tile)
    raised, added = q.new_empty(0), inputs.added
    if added is not None and may_be_raised(added):
        copies = (*added.shape[:2], q.shape[2])
        shape = torch.broadcast_shapes(copies, (batch, 1, 1))
        raised = added.new_empty((*shape, 1))
    table = torch.empty(size, dtype=torch.int64, device="cpu")
    return bound, torch.empty_like(bound), table, raised


@torch.library.custom_op("cp::attention_step_masked", mutates_args=())
def attention_step_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    extras: Sequence[Tensor],
    summary: Sequence[Tensor],
    place: Sequence[int],
    source: int,
    spec: str,
    final: bool,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from q to one rank's chunk of keys, and add that to running (out, lse).

    Args:
        extras, place, spec: those of cp::mask_summary, and `summary` its results.
        source: the rank whose keys these are.
        The others are those of cp::attention_step. k and v may be padded.
    """
    inputs, places = AttentionInputs.of(spec, extras), RingPlace.of_list(place).places
    rows = MaskedRows.of(q, v, inputs, places, MaskSummary(*summary))
    running = RunningAttention(q, v.shape[-1], out, lse)
    rows.forward(running, k, v, source)
    return running.result(final)


@attention_step_masked.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    extras: Sequence[Tensor],
    summary: Sequence[Tensor],
    place: Sequence[int],
    source: int,
    spec: str,
    final: bool,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(q.dtype)
    shape = (*q.shape[:-1], v.shape[-1])
    new_out = q.new_empty(shape, dtype=q.dtype if final else dtype)
    return new_out, q.new_empty(q.shape[:-1], dtype=dtype)


@torch.library.custom_op("cp::attention_step_masked_backward", mutates_args=())
def attention_step_masked_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor | None,
    extras: Sequence[Tensor],
    summary: Sequence[Tensor],
    place: Sequence[int],
    source: int,
    spec: str,
    bias_grad: bool,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute what one chunk adds to the gradients.

    Args:
        grad, out, lse: of the whole attention; grad and out may have the column of
            Note [Gradient of the log-sum-exp].
        dq: [B, H, R, D] of the earlier steps, in the accumulation dtype; None before
            the first one.
        The others are those of cp::attention_step_masked and cp::mask_summary.

    Returns: dq so far, dk and dv of this chunk, all in the accumulation dtype; the
    gradient of the bias for the keys of this chunk, without padding, [B or 1, H or 1,
    R, keys], or without elements. The gradient of a bias of positions is whole, in the
    accumulation dtype.
    """
    inputs, places = AttentionInputs.of(spec, extras), RingPlace.of_list(place).places
    rows = MaskedRows.of(q, v, inputs, places, MaskSummary(*summary), bias_grad)
    found = MaskedGradients(rows, grad, q, out, lse, bias_grad)
    dk, dv = found.of_source(k, v, source)
    total = found.dq
    if dq is not None:
        total = total.add_(dq)  # it is ours, and contiguous
    held = places.keys[source]
    if is_of_positions(found.dbias):
        return total, dk, dv, found.dbias
    parts = [found.dbias.narrow(3, x.position, x.count) for x in held if bias_grad]
    empty = found.dbias.new_empty((0, 0, 0, 0))
    return total, dk, dv, torch.cat(parts, 3) if parts else empty


@attention_step_masked_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor | None,
    extras: Sequence[Tensor],
    summary: Sequence[Tensor],
    place: Sequence[int],
    source: int,
    spec: str,
    bias_grad: bool,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype, bias = accumulation_dtype(q.dtype), AttentionInputs.of(spec, extras).bias
    dq_new, dk, dv = (x.new_empty(x.shape, dtype=dtype) for x in (q, k, v))
    keys = RingPlace.of_list(place).keys.count(source)
    if bias is not None and bias_grad and is_of_positions(bias):
        return dq_new, dk, dv, bias.new_empty(bias.shape, dtype=dtype)
    if bias is None or not bias_grad or not keys:
        empty = (q if bias is None else bias).new_empty((0, 0, 0, 0))
        return dq_new, dk, dv, empty
    return dq_new, dk, dv, bias.new_empty((*bias.shape[:3], keys))
