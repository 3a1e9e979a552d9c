"""What the operators of attention steps are told of the keys, as they take it.

    attention_step(q, k, v, out, lse, extras, seen, limits, spec, final, kernel, after)

All operators of steps have these four arguments. The spec tells what they hold:

              without mask or changes               under a mask, or with changes
    extras    -                                     the tensors that the spec names
    seen      no tensor, or the upper limit         the fields of a MaskSummary
              of each row, and the lower one
    limits    Visible.to_list                       RingPlace.to_list, and the source

ChunkLimits and ChunkMask are these arguments inside of the package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import CustomOpDef

from cpcompile.geometry.blocks import Block, square
from cpcompile.geometry.layout import Layout, Runs
from cpcompile.geometry.mask_blocks import spans
from cpcompile.geometry.visibility import ALL, Visible, limits_of_rows
from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.attention_spec import (
    AttentionInputs,
    AttentionSpec,
    is_of_positions,
)
from cpcompile.ops.step.aten_flash import is_empty
from cpcompile.ops.step.math_attention import accumulation_dtype
from cpcompile.ops.step.row_mask import RowMask
from cpcompile.ops.step.row_work import RowWork
from cpcompile.ops.step.rows_under_mask import MaskedRows, MaskSummary, TokenSpans
from cpcompile.ops.step.template_steps import Launch, TemplateSteps

_LAYOUTS = tuple(Layout)


class StepArguments(NamedTuple):
    """The arguments that all operators of steps share; see the table above."""

    extras: Sequence[Tensor]
    seen: Sequence[Tensor]
    limits: Sequence[int]
    spec: str

    def read(self) -> ChunkLimits | ChunkMask:
        """Undo the `arguments` of either."""
        spec = AttentionSpec.of_text(self.spec)
        if not spec.has_modifiers:
            visible = Visible.of_list(self.limits)
            return ChunkLimits(spec.scale, visible, *self.seen)
        *place, source = self.limits
        return ChunkMask(
            AttentionInputs.of(self.spec, self.extras),
            MaskSummary(*self.seen),
            RingPlace.of_list(place),
            source,
        )


@dataclass(frozen=True)
class ChunkLimits:
    """The keys of a chunk that rows see, as integers or as vectors of limits.

    upper, lower: int32 [R], never decreasing: row i sees the keys lower[i] <= j <
        upper[i]; instead of these limits of `visible`. A lower one needs an upper one.
    """

    scale: float
    visible: Visible = ALL
    upper: Tensor | None = None
    lower: Tensor | None = None

    def arguments(self) -> StepArguments:
        """Return the arguments of the operators."""
        seen = [x for x in (self.upper, self.lower) if x is not None]
        return StepArguments([], seen, self.visible.to_list(), _plain(self.scale))

    def work(
        self, q: Tensor, k: Tensor, kernel: StepKernel, bias_grad: bool = False
    ) -> RowWork:
        """Return what the rows of q compute on these keys."""
        if kernel is StepKernel.TEMPLATE:
            launches = [Launch(upper=self.upper, lower=self.lower)]
            templates = TemplateSteps(launches, self.scale, self.visible)
            return RowWork(kernel, self.scale, templates=templates)
        if self.visible.is_empty or is_empty(q, k):
            return RowWork(kernel, self.scale)
        R, K = q.shape[2], k.shape[2]
        blocks = None if self.upper is not None else self.visible.blocks(R, K)
        if blocks is None:
            whole = Block(0, R, 0, K, masked=True)
            mask = self.row_mask(R, K, q.device)
            return RowWork(StepKernel.MATH, self.scale, (whole,), mask=mask)
        if kernel is StepKernel.FLASH and q.device.type != "cpu":
            blocks = tuple(part for block in blocks for part in square(block))
        return RowWork(kernel, self.scale, blocks)

    def row_mask(self, rows: int, keys: int, device: torch.device) -> RowMask:
        """Return the limits as key ranges of the rows."""
        visible = self.visible
        if self.upper is not None:
            visible = replace(visible, upper=None)
        if self.lower is not None:
            visible = replace(visible, lower=None)
        lower, upper = limits_of_rows(visible, rows, keys, device)
        if self.upper is not None:
            upper = torch.minimum(upper, self.upper)
        if self.lower is not None:
            lower = torch.maximum(lower, self.lower)
        return RowMask(lower.unsqueeze(0), upper.unsqueeze(0))


@functools.lru_cache(maxsize=64)  # each step of a model has the same
def _plain(scale: float) -> str:
    """Return the text of a spec that has nothing but the scale."""
    return str(AttentionSpec(scale))


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

    @functools.cached_property
    def spans(self) -> TokenSpans:
        """The tokens of all ranks, as spans."""
        rows, keys = (
            tuple(spans(self.layout, runs, rank) for rank in range(runs.ranks))
            for runs in (self.queries, self.keys)
        )
        lengths = self.queries.length, self.keys.length
        return TokenSpans(rows, keys, self.rank, lengths)


@dataclass(frozen=True)
class ChunkMask:
    """The keys of one rank of a ring, `source`, under a mask that is summarized."""

    inputs: AttentionInputs
    summary: MaskSummary
    place: RingPlace
    source: int

    def arguments(self) -> StepArguments:
        """Return the arguments of the operators."""
        extras, spec = self.inputs.arguments()
        limits = [*self.place.to_list(), self.source]
        return StepArguments(extras, list(self.summary), limits, spec)

    def work(
        self, q: Tensor, k: Tensor, kernel: StepKernel, bias_grad: bool = False
    ) -> RowWork:
        """Return what the rows of q compute on these keys, which may be padded."""
        rows = MaskedRows(q, self.inputs, self.place.spans, kernel, bias_grad)
        return rows.work(self.summary, self.source, k.shape[2])

    def own_columns(self, dbias: Tensor) -> Tensor:
        """Return the gradient of the bias for these keys, without padding.

        It is [B or 1, H or 1, R, keys]; that of a bias of positions is whole.
        """
        if is_of_positions(dbias):
            return dbias
        held = self.place.spans.keys[self.source]
        columns = [dbias.narrow(3, x.position, x.count) for x in held]
        return torch.cat(columns, 3) if columns else dbias.new_empty((0, 0, 0, 0))

    def fake_columns(self, q: Tensor) -> Tensor:
        """Return a fake result of own_columns; without elements for no bias."""
        bias, keys = self.inputs.bias, self.place.keys.count(self.source)
        if bias is None or not (keys or is_of_positions(bias)):
            return (q if bias is None else bias).new_empty((0, 0, 0, 0))
        if is_of_positions(bias):
            return bias.new_empty(bias.shape, dtype=accumulation_dtype(q.dtype))
        return bias.new_empty((*bias.shape[:3], keys))


def fake_by_name(op: CustomOpDef, result: Callable[[Mapping[str, Any]], Any]) -> None:
    """Give `op` fake results, which `result` makes of its arguments by name."""
    names = [x.name for x in op._opoverload._schema.arguments]

    def fake(*args: Any, **kwargs: Any) -> Any:
        return result(dict(zip(names, args, strict=False)) | kwargs)

    op.register_fake(fake)


def fake_sum(x: Tensor, final: bool, last_dim: int | None = None) -> Tensor:
    """Return a fake sum over steps like x: in its dtype at the end, else wider."""
    shape = x.shape if last_dim is None else (*x.shape[:-1], last_dim)
    dtype = x.dtype if final else accumulation_dtype(x.dtype)
    return x.new_empty(shape, dtype=dtype)
