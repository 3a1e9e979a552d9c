"""Report what was done to a graph, for the log, for `cp.explain` and for tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch.distributed.tensor import DTensor

from cpcompile.accounting.graph_account import Account, GraphAccount
from cpcompile.cost.mixer_plan import MixerPlan
from cpcompile.cost.plans import Plan, Strategy
from cpcompile.cost.strategies import STRATEGIES
from cpcompile.geometry.layout import Layout
from cpcompile.geometry.masks import Mask
from cpcompile.kernels.choice import StepKernel, masked_step_kernel, step_kernel
from cpcompile.kernels.score_functions import triton_functions
from cpcompile.ops.attention_spec import is_of_positions
from cpcompile.options import GradSync
from cpcompile.passes.graph.context import AttentionCall, Context
from cpcompile.passes.graph.cp_attention import dtype_in_call
from cpcompile.passes.graph.graph_pass import PassRun
from cpcompile.passes.graph.nodes import expected_shape, fake_value, module_path
from cpcompile.passes.joint.saving.save_by_budget import Saved, SavingBudget
from cpcompile.passes.joint.tiling.tile_tokens import NO_TILES, TiledRegion, Tiling
from cpcompile.passes.local.folding.fold_repeated_blocks import FoldedBlocks
from cpcompile.passes.local.folding.folding_options import Folding


@dataclass(frozen=True)
class CallReport:
    """One attention call; `plan` is None if it was not rewritten, for `reason`.

    in_windows: whether each rank attends within whole windows of its own.
    kernel: value of the StepKernel; under max-autotune a faster one may replace it. The
        attention of Ulysses is aten's choice on a GPU, "aten_sdpa". The backward is
        named where it differs: what a score_mod captures has a gradient.
    latent_source: what every rank makes keys and values of, "l.0.down [2, 32, 24]".
    """

    path: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    dtype: str
    mask: str
    plan: Plan | None
    reason: str | None
    kernel: str | None
    dropout_p: float = 0.0
    latent_source: str = ""
    in_windows: bool = False

    @property
    def form(self) -> str | None:
        """Strategy and layout, such as "ring zigzag", or "windows"; None if neither."""
        if self.in_windows:
            return "windows"
        return None if self.plan is None else _form(self.plan)

    @classmethod
    def of(cls, call: AttentionCall, ctx: Context) -> CallReport:
        plan, mask = ctx.findings.plans.get(call), ctx.findings.masks.get(call)
        kernel = _kernel(call, mask, plan, ctx.mesh.device_type)
        return cls(
            path=call.path,
            query=call.q_shape,
            key=call.k_shape,
            dtype=str(call.dtype).removeprefix("torch."),
            mask=_with_form(_mask(call, mask), call, ctx),
            plan=plan,
            reason=call.unsupported or call.already_local,
            kernel=None if plan is None else kernel,
            dropout_p=call.dropout_p,
            latent_source=_latent_source(call, plan, ctx),
            in_windows=call.in_windows,
        )


def _with_form(mask: str, call: AttentionCall, ctx: Context) -> str:
    """Say of a mask that was not read which ranks have what of it."""
    plans = list(ctx.findings.plans)
    form = ctx.findings.mask_forms.get(plans.index(call)) if call in plans else None
    return mask if form is None else f"{mask}, {form}"


def _kernel(
    call: AttentionCall, mask: Mask | None, plan: Plan | None, device_type: str
) -> str:
    """Name what computes a call, as the operators choose it."""
    what = device_type, call.dtype, call.q_shape[-1], int(fake_value(call.v).shape[-1])
    if call.score_mod:
        inlined = triton_functions(call.score_mod) is not None
        usual = step_kernel(*what)
        takes = inlined and usual is StepKernel.TEMPLATE
        name = (usual if takes else StepKernel.MATH).value
        if takes and call.values is not None and fake_value(call.values).requires_grad:
            return f"{name}, backward {StepKernel.MATH.value}"
        return str(name)
    if mask is not None or call.changes_scores:
        bias, table = None, False
        if mask is not None and mask.bias is not None:
            value = fake_value(mask.bias)
            bias, table = dtype_in_call(call, value.dtype), is_of_positions(value)
        return masked_step_kernel(*what, bias, call.changes_scores, table).value
    if plan and not STRATEGIES[plan.strategy].runs_steps and device_type != "cpu":
        return "aten_sdpa"
    return step_kernel(*what).value


def _latent_source(call: AttentionCall, plan: Plan | None, ctx: Context) -> str:
    """Name the values of which every rank makes keys and values, and their size."""
    if plan is None or plan.strategy is not Strategy.LATENTS:
        return ""
    sources = ctx.findings.key_sources[call]
    values = [
        f"{module_path(x)} {list(expected_shape(fake_value(x)))}"
        for x in sources.gathered
    ]
    return f"{' and '.join(values)}, {sources.share:.1%} of their bytes"


def _form(plan: Plan) -> str:
    """Name the strategy and layout of a plan: "ring", "ring zigzag"."""
    balanced = plan.layout is not Layout.CONTIGUOUS
    return " ".join([plan.chosen.strategy_name] + [plan.layout.value] * balanced)


def _mask(call: AttentionCall, mask: Mask | None) -> str:
    """Return "causal, window 8", and what else changes scores and weights."""
    if mask is not None:
        text = mask.text
    elif call.mask is not None:
        text = "tensor"
    else:
        text = "causal" if call.is_causal else "none"
    softcap = [f"softcap {call.softcap:g}"] * bool(call.softcap)
    dropout = [f"dropout {call.dropout_p:g}"] * bool(call.dropout_p)
    sinks = ["sinks"] * (call.sinks is not None)
    score_mod = ["score_mod"] * bool(call.score_mod)
    return ", ".join([text, *softcap, *score_mod, *sinks, *dropout])


@dataclass(frozen=True)
class AttentionShare:
    """One attention call. path: its module.

    form: strategy and layout, such as "ring zigzag"; of attention by hand "rows" if a
        rank computes its own queries, and "batch" if it computes its own entries of the
        batch, such as windows, or its own heads; None if every rank computes all.
    reason: why it is not shared out, or by hand.
    """

    path: str
    form: str | None
    reason: str | None = None


def part_of_attention(softmax: fx.Node, ctx: Context) -> str | None:
    """Return what a rank has of the weights of attention that is written by hand.

    "batch" for whole rows of its own entries of the batch, such as windows, or of its
    own heads; "rows" for its own queries, with the keys of all ranks; None for all.
    """
    value, dim = fake_value(softmax), ctx.findings.rows_by_hand.get(softmax.name)
    if isinstance(value, DTensor):
        dim = getattr(value.placements[ctx.axis], "dim", None)
    if dim is None:
        return None
    return "batch" if dim < value.ndim - 2 else "rows"  # queries and keys are the last


@dataclass(frozen=True)
class ShardedInput:
    """An argument whose tokens are shared out, and whether the user said so.

    sizes: of all ranks together.
    """

    name: str
    dim: int
    inferred: bool
    sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        how = "inferred" if self.inferred else "given"
        return f"{self.name} dim {self.dim} ({how})"


@dataclass(frozen=True)
class GraphReport:
    """The report of one compiled graph.

    distributed_calls: those of which ranks have parts, forward and backward.
    inputs: arguments that are sharded.
    began: values in which tokens begin, where no input has them, "conv2d [2, 36, 8]".
    by_hand: attention that is written by hand and stays so.
    tiles: regions that run tile by tile. later: results that are made after it, once
    more. saved: what a budget lets the forward save.
    folded: blocks that are one function, of the forward and of the backward.
    accounts: what the forward and the backward exchange.
    mixers: what mixes tokens and is no attention, and how it is shared.
    gradients: what parameters get where it is not the complete gradient, and for whom.
    """

    frame: str
    ranks: int
    calls: tuple[CallReport, ...]
    passes: tuple[PassRun, ...]
    gathered: tuple[str, ...]
    distributed_calls: int
    relayouts_left: int
    relayouts_cancelled: int
    inputs: tuple[ShardedInput, ...] = ()
    began: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    by_hand: tuple[AttentionShare, ...] = ()
    tiles: tuple[TiledRegion, ...] = ()
    later: tuple[str, ...] = ()
    saved: tuple[Saved, ...] = ()
    folded: tuple[FoldedBlocks, ...] = ()
    accounts: tuple[GraphAccount, ...] = ()
    mixers: tuple[MixerPlan, ...] = ()

    @classmethod
    def of(
        cls,
        ctx: Context,
        passes: tuple[PassRun, ...],
        frame: str,
        tiling: Tiling = NO_TILES,
        saving: SavingBudget | None = None,
        folding: Folding | None = None,
        accounts: Sequence[GraphAccount] = (),
    ) -> GraphReport:
        return cls(
            frame=frame,
            ranks=ctx.ranks,
            calls=tuple(CallReport.of(c, ctx) for c in ctx.findings.calls),
            passes=passes,
            gathered=tuple(ctx.findings.gathered_results),
            distributed_calls=ctx.findings.localised,
            relayouts_left=ctx.findings.relayouts,
            relayouts_cancelled=ctx.findings.relayouts_cancelled,
            inputs=_sharded_inputs(ctx),
            began=tuple(ctx.findings.token_origins),
            gradients=_gradients(ctx),
            by_hand=tuple(
                AttentionShare(module_path(x), part_of_attention(x, ctx), why)
                for x, why in (
                    *ctx.findings.unmatched_attention,
                    *ctx.findings.row_parallel,
                )
            ),
            tiles=tuple(tiling.found),
            later=tuple(x.name for x in ctx.findings.later_results),
            saved=() if saving is None else tuple(saving.found),
            folded=() if folding is None else tuple(folding.found),
            accounts=tuple(accounts),
            mixers=tuple(ctx.findings.mixers),
        )

    @property
    def account(self) -> Account:
        """The accounts of forward and backward as one."""
        return account_of([self])

    def summary(self) -> str:
        """Return one line for the log."""
        chosen = [c.form for c in self.calls if c.form is not None]
        counts = ", ".join(f"{chosen.count(s)} {s}" for s in sorted(set(chosen)))
        seconds = sum(run.seconds for run in self.passes)
        return (
            f"{self.frame}: {len(self.calls)} attention calls on {self.ranks} ranks "
            f"({counts or 'none rewritten'}), {self.distributed_calls} calls on "
            f"DTensors{self._relayouts()}, passes took {seconds:.2f} s"
        )

    def edges(self) -> list[str]:
        """Return lines that say where tokens enter, and which gradients leave."""
        lines = []
        if self.inputs:
            lines.append(f"sharded inputs: {', '.join(map(str, self.inputs))}")
        if self.began:
            lines.append(f"tokens begin at: {', '.join(self.began)}")
        lines += [f"in tiles: {tile}" for tile in self.tiles]
        lines += [f"made once more for the caller: {name}" for name in self.later]
        lines += [f"activation memory: {saved}" for saved in self.saved]
        if self.folded:
            lines.append(f"repeated: {', '.join(map(str, self.folded))}")
        return [*lines, *self.gradients]

    def _relayouts(self) -> str:
        if not self.relayouts_left + self.relayouts_cancelled:
            return ""
        return (
            f", {self.relayouts_left} relayouts left of "
            f"{self.relayouts_left + self.relayouts_cancelled}"
        )


def account_of(graphs: Iterable[GraphReport]) -> Account:
    """Return the account of several graphs together."""
    return Account(tuple(x for graph in graphs for x in graph.accounts))


def _sharded_inputs(ctx: Context) -> tuple[ShardedInput, ...]:
    return tuple(
        ShardedInput(x.name, x.dim, x.inferred, expected_shape(fake_value(node)))
        for node, x in ctx.inputs.items()
        if x.name is not None and x.dim is not None
    )


def _gradients(ctx: Context) -> tuple[str, ...]:
    words = {
        GradSync.REDUCE: "summed over the axis",
        GradSync.NONE: "the share of each rank",
        GradSync.AVERAGE: f"the share of each rank times {ctx.mesh.size()}",
    }
    kinds = Counter(
        (graph_input.gradient, graph_input.reducer)
        for graph_input in ctx.inputs.values()
        if graph_input.gradient is not GradSync.REDUCE
        or graph_input.reducer is not None
    )
    return tuple(
        f"gradients of {count} parameters: {words[gradient]}"
        + (f", for {reducer}" if reducer else "")
        for (gradient, reducer), count in kinds.items()
    )


_recorders: list[list[GraphReport]] = []


@contextmanager
def recording() -> Iterator[list[GraphReport]]:
    """Collect the reports of the graphs that run inside of the block, in order."""
    reports: list[GraphReport] = []
    _recorders.append(reports)
    try:
        yield reports
    finally:
        # By identity: an equal list may be that of a recording around this one.
        _recorders[:] = [recorder for recorder in _recorders if recorder is not reports]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
def record(report: GraphReport) -> None:
    """Add `report` to all recordings; every compiled graph calls this when it runs."""
    for reports in _recorders:
        reports.append(report)
