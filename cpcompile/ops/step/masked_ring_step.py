"""cp::attention_step under a mask: local queries meet one chunk of a ring's keys.

A mask is looked at once, by cp::look_at_mask; each step computes what it leaves of one
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
from cpcompile.ops.step.masked_gradients import MaskedGradients
from cpcompile.ops.step.masked_steps import (
    MaskedRows,
    MaskSummary,
    TokenSpans,
    look_at,
    tile_of,
)
from cpcompile.ops.step.math_attention import accumulation_dtype
from cpcompile.ops.step.online_softmax import RunningAttention
from cpcompile.ops.step.position_bias import is_of_positions
from cpcompile.ops.step.row_mask import MaskOperands, may_be_raised

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


@torch.library.custom_op("cp::look_at_mask", mutates_args=())
def look_at_mask(
    q: Tensor,
    v: Tensor,
    masks: Sequence[Tensor | None],
    known: str,
    place: Sequence[int],
    bias_grad: bool,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    score_mod: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Look at a mask once, for all steps of a ring; return the fields of a Look.

    Args:
        q, v: of the ring; their values are not read.
        masks, known: the fields of MaskOperands.
        place: a RingPlace as integers.
        bias_grad: whether the backward wants the gradient of the bias.
        softcap, dropout_p, score_mod: of cp::ring_attention.
    """
    changes = (softcap, dropout_p)
    own = MaskOperands.of(masks, known, *changes, score_mod=score_mod)
    ring = RingPlace.of_list(place)
    seen = look_at(q, v, own, ring.places, bias_grad)
    return seen.lower, seen.upper, seen.table, seen.raised


@look_at_mask.register_fake
def _(
    q: Tensor,
    v: Tensor,
    masks: Sequence[Tensor | None],
    known: str,
    place: Sequence[int],
    bias_grad: bool,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    score_mod: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    changes = (softcap, dropout_p)
    own = MaskOperands.of(masks, known, *changes, score_mod=score_mod)
    ring = RingPlace.of_list(place)
    batch = max(1 if x is None else x.shape[0] for x in masks[1:])
    bound = q.new_empty((batch, q.shape[2]), dtype=torch.int64)
    size = 0
    if not known:
        places, tile = ring.places, tile_of(q, v, own, bias_grad)
        size = size_of_look(places.rows, places.keys, places.rank, tile)
    raised = q.new_empty(0)
    if own.added is not None and may_be_raised(own.added):
        copies = (*own.added.shape[:2], q.shape[2])
        shape = torch.broadcast_shapes(copies, (batch, 1, 1))
        raised = own.added.new_empty((*shape, 1))
    table = torch.empty(size, dtype=torch.int64, device="cpu")
    return bound, torch.empty_like(bound), table, raised


@torch.library.custom_op("cp::attention_step_masked", mutates_args=())
def attention_step_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    masks: Sequence[Tensor | None],
    known: str,
    seen: Sequence[Tensor],
    place: Sequence[int],
    source: int,
    scale: float,
    final: bool,
    after: Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seeds: Tensor | None = None,
    score_mod: str = "",
) -> tuple[Tensor, Tensor]:
    """Attend from q to one rank's chunk of keys, and add that to running (out, lse).

    Args:
        masks, known, place: those of cp::look_at_mask, and seen what it returns.
        source: the rank whose keys these are.
        The others are those of cp::attention_step. k and v may be padded.
    """
    changes = (softcap, dropout_p, seeds)
    own = MaskOperands.of(masks, known, *changes, score_mod=score_mod)
    places = RingPlace.of_list(place).places
    rows = MaskedRows.of(q, v, own, places, MaskSummary(*seen), scale)
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
    masks: Sequence[Tensor | None],
    known: str,
    seen: Sequence[Tensor],
    place: Sequence[int],
    source: int,
    scale: float,
    final: bool,
    after: Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seeds: Tensor | None = None,
    score_mod: str = "",
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
    masks: Sequence[Tensor | None],
    known: str,
    seen: Sequence[Tensor],
    place: Sequence[int],
    source: int,
    scale: float,
    bias_grad: bool,
    after: Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seeds: Tensor | None = None,
    score_mod: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute what one chunk adds to the gradients.

    Args:
        grad, out, lse: of the whole attention; grad and out may have the column of
            Note [Gradient of the log-sum-exp].
        dq: [B, H, R, D] of the earlier steps, in the accumulation dtype; None before
            the first one.
        The others are those of cp::attention_step_masked and cp::look_at_mask.

    Returns: dq so far, dk and dv of this chunk, all in the accumulation dtype; the
    gradient of the bias for the keys of this chunk, without padding, [B or 1, H or 1,
    R, keys], or without elements. The gradient of a bias of positions is whole, in the
    accumulation dtype.
    """
    ring = RingPlace.of_list(place)
    changes = (softcap, dropout_p, seeds)
    own = MaskOperands.of(masks, known, *changes, score_mod=score_mod)
    rows = MaskedRows.of(q, v, own, ring.places, MaskSummary(*seen), scale, bias_grad)
    found = MaskedGradients(rows, grad, q, out, lse, bias_grad)
    dk, dv = found.of_source(k, v, source)
    total = found.dq
    if dq is not None:
        total = total.add_(dq)  # it is ours, and contiguous
    held = ring.places.keys[source]
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
    masks: Sequence[Tensor | None],
    known: str,
    seen: Sequence[Tensor],
    place: Sequence[int],
    source: int,
    scale: float,
    bias_grad: bool,
    after: Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seeds: Tensor | None = None,
    score_mod: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype, bias = accumulation_dtype(q.dtype), masks[0]
    dq_new, dk, dv = (x.new_empty(x.shape, dtype=dtype) for x in (q, k, v))
    keys = RingPlace.of_list(place).keys.count(source)
    if bias is not None and bias_grad and is_of_positions(bias):
        return dq_new, dk, dv, bias.new_empty(bias.shape, dtype=dtype)
    if bias is None or not bias_grad or not keys:
        empty = (q if bias is None else bias).new_empty((0, 0, 0, 0))
        return dq_new, dk, dv, empty
    return dq_new, dk, dv, bias.new_empty((*bias.shape[:3], keys))
