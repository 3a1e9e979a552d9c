"""What the operators of attention steps are told of a chunk of keys, as they take it.

    attention_step(
        q, k, v, out, lse, extras, summary, upper, visible, place, spec, final, kernel,
        after,
    )

Both operators of steps have these arguments:

    extras, spec      what is computed, and the tensors that it names
    visible, upper    without a mask: a Visible as a list, and the upper limit of each
                      row where numbers of that are symbols
    summary, place    under a mask, or with changed scores: the fields of a MaskSummary,
                      and a RingPlace as a list

StepChunk is these arguments inside of the package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import CustomOpDef

from cpcompile.geometry.blocks import square
from cpcompile.geometry.layout import Layout, Runs
from cpcompile.geometry.mask_blocks import spans
from cpcompile.geometry.visibility import ALL, Visible
from cpcompile.kernels.choice import StepKernel
from cpcompile.kernels.constants import EVERY_KEY, RowLimits
from cpcompile.ops.attention_spec import AttentionInputs, AttentionSpec, is_of_positions
from cpcompile.ops.step.aten_flash import is_empty
from cpcompile.ops.step.math_attention import accumulation_dtype
from cpcompile.ops.step.row_work import RowWork
from cpcompile.ops.step.rows_under_mask import MaskedRows, MaskSummary, TokenSpans
from cpcompile.ops.step.template_steps import Launch, TemplateSteps

_LAYOUTS = tuple(Layout)


class StepArguments(NamedTuple):
    """The arguments that both operators share; see the table above."""

    extras: Sequence[Tensor]
    summary: Sequence[Tensor]
    upper: Tensor | None
    visible: Sequence[int]
    place: Sequence[int]
    spec: str

    def read(self) -> StepChunk:
        """Undo StepChunk.arguments."""
        inputs = AttentionInputs.of(self.spec, self.extras)
        if not inputs.has_modifiers:
            return StepChunk(
                inputs, RowLimits(Visible.of_list(self.visible), self.upper)
            )
        place = RingPlace.of_list(self.place)
        return StepChunk(inputs, summary=MaskSummary(*self.summary), place=place)


@dataclass(frozen=True)
class RingPlace:
    """One rank of a ring, the rank whose keys it has, and which tokens all ranks hold.

    source: of the keys.
    """

    queries: Runs
    keys: Runs
    layout: Layout
    rank: int
    source: int

    def to_list(self) -> list[int]:
        """Return the integers that operators take."""
        runs = [vars(x).values() for x in (self.queries, self.keys)]
        place = (_LAYOUTS.index(self.layout), self.rank, self.source)
        return [*runs[0], *runs[1], *place]

    @classmethod
    def of_list(cls, numbers: Sequence[int]) -> RingPlace:
        """Undo to_list."""
        *runs, layout, rank, source = numbers
        return cls(Runs(*runs[:4]), Runs(*runs[4:]), _LAYOUTS[layout], rank, source)

    @property
    def spans(self) -> TokenSpans:
        """The tokens of all ranks, as spans."""
        return _token_spans(self.queries, self.keys, self.layout, self.rank)


@functools.lru_cache(maxsize=64)  # each step and each layer has the same
def _token_spans(queries: Runs, keys: Runs, layout: Layout, rank: int) -> TokenSpans:
    of_rows, of_keys = (
        tuple(spans(layout, runs, each) for each in range(runs.ranks))
        for runs in (queries, keys)
    )
    return TokenSpans(of_rows, of_keys, rank, (queries.length, keys.length))


@dataclass(frozen=True)
class StepChunk:
    """One chunk of keys, and what the rows of a step see of it.

    limits: without a mask; the templates alone take a vector, and none for the lower.
    summary, place: of a mask, or where scores are changed, and None else.
    """

    inputs: AttentionInputs
    limits: RowLimits = EVERY_KEY
    summary: MaskSummary | None = None
    place: RingPlace | None = None

    @classmethod
    def plain(
        cls, scale: float, visible: Visible = ALL, upper: Tensor | None = None
    ) -> StepChunk:
        """Make a chunk without a mask."""
        inputs = AttentionInputs(AttentionSpec(scale))
        return cls(inputs, RowLimits(visible, upper))

    def arguments(self) -> StepArguments:
        """Return the arguments of the operators."""
        if self.summary is None or self.place is None:
            visible, upper = self.limits.visible.to_list(), self.limits.upper
            spec = _text_of(self.inputs.spec)
            return StepArguments([], [], upper, visible, [], spec)
        extras, spec = self.inputs.arguments()
        place = self.place.to_list()
        return StepArguments(extras, list(self.summary), None, [], place, spec)

    def work(
        self, q: Tensor, k: Tensor, kernel: StepKernel, bias_grad: bool = False
    ) -> RowWork:
        """Return what the rows of q compute on these keys; with a mask k may be padded.

        Raises: ValueError for a vector of limits, but for the templates.
        """
        if self.summary is not None and self.place is not None:
            rows = MaskedRows(q, self.inputs, self.place.spans, kernel, bias_grad)
            return rows.work(self.summary, self.place.source, k.shape[2])
        limits, scale = self.limits, self.inputs.spec.scale
        if kernel is StepKernel.TEMPLATE:
            templates = TemplateSteps([Launch(limits)], scale)
            return RowWork(kernel, scale, templates=templates)
        if limits.upper is not None:
            raise ValueError(
                f"cp::attention_step: got upper {tuple(limits.upper.shape)} with the "
                f"kernel {kernel.value!r}; needed integers, in visible, or the kernel "
                f"{StepKernel.TEMPLATE.value!r}"
            )
        if limits.visible.is_empty or is_empty(q, k):
            return RowWork(kernel, scale)
        blocks = limits.visible.blocks(q.shape[2], k.shape[2])
        if kernel is StepKernel.FLASH and q.device.type != "cpu":
            blocks = tuple(part for block in blocks for part in square(block))
        return RowWork(kernel, scale, blocks)

    def own_columns(self, dbias: Tensor) -> Tensor:
        """Return the gradient of the bias for these keys, without padding.

        It is [B or 1, H or 1, R, keys]; that of a bias of positions is whole.
        """
        if is_of_positions(dbias) or self.place is None:
            return dbias
        held = self.place.spans.keys[self.place.source]
        columns = [dbias.narrow(3, x.position, x.count) for x in held]
        if len(columns) == 1:
            return columns[0].contiguous()
        return torch.cat(columns, 3) if columns else dbias.new_empty((0, 0, 0, 0))

    def fake_columns(self, q: Tensor) -> Tensor:
        """Return a fake result of own_columns; without elements for no bias."""
        bias, place = self.inputs.bias, self.place
        if bias is not None and is_of_positions(bias):
            return bias.new_empty(bias.shape, dtype=accumulation_dtype(q.dtype))
        keys = 0 if place is None else place.keys.count(place.source)
        if bias is None or not keys:
            return (q if bias is None else bias).new_empty((0, 0, 0, 0))
        return bias.new_empty((*bias.shape[:3], keys))


@functools.lru_cache(maxsize=64)  # each step of a model has the same
def _text_of(spec: AttentionSpec) -> str:
    return str(spec)


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
