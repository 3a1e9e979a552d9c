"""Predict every way to run one attention call, and choose the cheapest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from cpcompile.cost.evaluate import evaluator
from cpcompile.cost.hardware.profile import HardwareProfile
from cpcompile.cost.model import relayout_cost
from cpcompile.cost.plans import (
    TIE_FRACTION,
    Candidate,
    Direction,
    Plan,
    Strategy,
    Workload,
)
from cpcompile.cost.strategies import STRATEGIES
from cpcompile.cost.symbols import SYMBOLS, numbers
from cpcompile.errors import RewriteError
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.head_split import group_counts
from cpcompile.geometry.layout import Layout

BALANCED = (Layout.ZIGZAG, Layout.STRIPED, Layout.FOLD)

# Share of the budget: an attention call that takes less takes nothing that is scarce.
PLENTY = 1 / 256

# Its result would have to be gathered for whatever reads it on the others.
_RANK_WITHOUT_QUERIES = "a rank would have no query"


def choose(
    workload: Workload,
    profile: HardwareProfile,
    *,
    strategy: Strategy | None = None,
    degrees: CPDegrees | None = None,
    layouts: Sequence[Layout] = (Layout.CONTIGUOUS,),
    memory_budget: float | None = None,
    tie_fraction: float = TIE_FRACTION,
    runnable: bool = False,
) -> Plan:
    """Choose the plan for one attention call; it has every candidate, best first.

    Times that differ from the best by at most `tie_fraction` of it are a tie, see
    `rank`.

    Args:
        strategy: chosen whatever it costs, in its best form; candidates are listed in
            the same order then.
        degrees: the only factorisation that the mesh allows a hybrid.
        layouts: those that can be made.
        memory_budget: extra bytes per rank that a strategy may take.
        runnable: leave out what the operators of this package cannot run.

    Raises: RewriteError if the forced strategy, or every strategy, is excluded; if
    for memory, the message has the smallest need.
    """
    budget = profile.memory_bytes if memory_budget is None else memory_budget
    forms = list(_forms(workload, layouts, degrees))

    def why_out(form: Candidate) -> str | None:
        few = STRATEGIES[form.strategy].few_queries
        if strategy is None and workload.has_few_queries and not few:
            return _RANK_WITHOUT_QUERIES
        return why_not_run(form, workload) if runnable else None

    reasons = map(why_out, forms)
    candidates = [
        predict(form, workload, profile, budget, degrees)
        if reason is None
        else replace(form, excluded=reason)
        for form, reason in zip(forms, reasons, strict=True)
    ]
    ranked = rank(candidates, tie_fraction, budget)
    wanted = [c for c in ranked if strategy in (None, c.strategy)]
    if not wanted or wanted[0].excluded is not None:
        raise RewriteError(_why_nothing(strategy, wanted, workload))
    return Plan(workload, wanted[0], strategy is not None, profile, ranked)


def _not_empty(workload: Workload) -> Workload:
    """Return the call with 1 in place of sizes of 0.

    Such a call costs nothing in any form, so any may win.
    """
    sizes = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim")
    empty: dict[str, Any] = {name: 1 for name in sizes if getattr(workload, name) == 0}
    return replace(workload, **empty) if empty else workload


def predict(
    form: Candidate,
    workload: Workload,
    profile: HardwareProfile,
    memory_budget: float,
    mesh: CPDegrees | None = None,
) -> Candidate:
    """Return `form` with its predicted cost on the slowest rank, or why it is out.

    Heads are exchanged in the fewest groups that the budget allows.
    """
    workload = _not_empty(workload)
    reason = _why_excluded(form, workload, mesh)
    if reason is not None:
        return replace(form, excluded=reason)
    found = _predict(form, workload, profile, memory_budget)
    ranks, grouped = form.degrees.ulysses, STRATEGIES[form.strategy].grouped
    if found.excluded is None or grouped is None or ranks == 1:
        return found
    for count in group_counts(workload.heads, workload.kv_heads, ranks):
        parts = replace(form, head_groups=count)
        smaller = _predict(parts, workload, profile, memory_budget)
        if (smaller.peak_extra_bytes or 0) < (found.peak_extra_bytes or 0):
            found = smaller
        if found.excluded is None:
            break
    return found


def _predict(
    form: Candidate,
    workload: Workload,
    profile: HardwareProfile,
    memory_budget: float,
) -> Candidate:
    layout, grouped = form.layout, form.head_groups > 1
    evaluate = _compiled(
        form.strategy, layout, workload.causal, workload.direction, grouped
    )
    values = numbers(workload, form.degrees, profile, form.head_groups)
    seconds, exposed, transfer, wire, peak, kernels, moving, moved = evaluate(
        *(values[symbol] for symbol in SYMBOLS)
    )
    relayout = layout is not Layout.CONTIGUOUS and (form.relayout or workload.relayout)
    if relayout:
        seconds, exposed, transfer = (x + moving for x in (seconds, exposed, transfer))
        wire += moved
    peak += workload.whole_mask_bytes
    reason = None
    if peak > memory_budget:
        reason = (
            f"needs {_mebibytes(peak)} of extra memory per rank, and the budget is "
            f"{_mebibytes(memory_budget)}"
        )
    return replace(
        form,
        seconds=seconds,
        exposed_seconds=exposed,
        hidden_seconds=max(0.0, transfer - exposed),
        wire_bytes=round(wire),
        peak_extra_bytes=round(peak),
        kernels=round(kernels),
        relayout=relayout,
        excluded=reason,
    )


def rank(
    candidates: Sequence[Candidate],
    tie_fraction: float = TIE_FRACTION,
    memory_budget: float = float("inf"),
) -> tuple[Candidate, ...]:
    """Sort candidates: those that tie with the fastest, the slower ones, the excluded.

    Among those that tie and take a small part of the budget, fewer kernels decide, then
    the time: what the model leaves out is mostly a cost per kernel. Among the other
    ties, which come after them, less memory decides, then fewer kernels.
    """
    times = [c.seconds for c in candidates if c.excluded is None and c.seconds]
    limit = min(times, default=0.0) * (1 + tie_fraction)
    plenty = memory_budget * PLENTY

    def order(candidate: Candidate) -> tuple[int, float, float, float]:
        seconds, peak = candidate.seconds, candidate.peak_extra_bytes
        kernels = candidate.kernels
        if seconds is None or peak is None or kernels is None:
            return (4, 0.0, 0.0, 0.0)
        if candidate.excluded is not None:
            return (3, peak, seconds, kernels)
        if seconds <= limit and peak <= plenty:
            return (0, kernels, seconds, peak)
        if seconds <= limit:
            return (1, peak, kernels, seconds)
        return (2, seconds, peak, kernels)

    return tuple(sorted(candidates, key=order))


def _forms(
    workload: Workload, layouts: Sequence[Layout], mesh: CPDegrees | None
) -> Iterator[Candidate]:
    for layout in layouts:
        for strategy, row in STRATEGIES.items():
            if row.few_queries and not workload.has_few_queries:
                continue
            if row.of_latents and workload.latents is None:
                continue
            indifferent = len(row.layouts) == 1 or workload.ranks == 1
            if indifferent and layout is not layouts[0]:
                continue  # which tokens lie where does not matter to it
            factorised = row.degrees(workload.ranks)
            if strategy is Strategy.HYBRID and mesh is not None:
                # So that the reason against it is the first.
                factorised = [mesh, *(other for other in factorised if other != mesh)]
            for degrees in factorised:
                yield Candidate(strategy, degrees, layout)


def _why_excluded(
    form: Candidate, workload: Workload, mesh: CPDegrees | None
) -> str | None:
    heads, kv_heads = workload.heads, workload.kv_heads
    if heads % kv_heads:
        return (
            f"{heads} query heads are not a multiple of {kv_heads} key/value heads; "
            f"repeat the key/value heads in the model"
        )
    if form.strategy is Strategy.HYBRID:
        if form.degrees.ranks != workload.ranks:
            return (
                f"{form.degrees} are {form.degrees.ranks} ranks, and there are "
                f"{workload.ranks}; give two factors of {workload.ranks}"
            )
        if mesh is not None and form.degrees != mesh:
            return f"the mesh is {mesh}"
    if form.layout in BALANCED and not (workload.causal or workload.masked):
        return f"{form.layout.value} balances causal attention only"
    if form.layout in BALANCED and workload.q_len != workload.kv_len:
        return f"{form.layout.value} needs as many queries as keys"
    return None


def why_not_run(form: Candidate, workload: Workload) -> str | None:
    """Say why the operators cannot run what can be predicted; None if they can."""
    layout, degrees, row = form.layout, form.degrees, STRATEGIES[form.strategy]
    if layout is Layout.CONTIGUOUS:
        return None
    if len(row.layouts) == 1:
        name = form.strategy.value
        return f"every rank of {name} has the whole sequence, in order"
    if layout not in row.layouts:
        able = [s.value for s, x in STRATEGIES.items() if layout in x.layouts]
        return f"{layout.value} is for {', '.join(able)} alone"
    if workload.masked and layout not in row.masked_layouts:
        return f"{layout.value} takes no mask but the causal one"
    if workload.bias_bytes:
        return "a mask that is a tensor lies in natural order"
    if min(degrees.ulysses, degrees.ring) > 1 and degrees.inner != "ulysses":
        return f"{layout.value} needs neighbours that exchange heads"
    return None


def _why_nothing(
    strategy: Strategy | None, wanted: Sequence[Candidate], workload: Workload
) -> str:
    what = "every strategy" if strategy is None else f"strategy {strategy.value}"
    if not wanted and strategy is Strategy.LATENTS:
        return (
            f"{what} is impossible here: k and v are not made, token by token, of "
            "values with less than half of their bytes; use another strategy"
        )
    if not wanted:
        return f"{what} is impossible here: {workload.ranks} ranks have no two factors"
    needs = [c for c in wanted if c.peak_extra_bytes is not None]
    if needs:
        least = min(needs, key=lambda c: c.peak_extra_bytes or 0)
        return (
            f"{what} is impossible here: {least.label} {least.excluded}; that is the "
            f"smallest need: raise memory_budget, or use more ranks"
        )
    return f"{what} is impossible here: {wanted[0].excluded}"


@cache
def _compiled(
    strategy: Strategy,
    layout: Layout,
    causal: bool,
    direction: Direction,
    grouped: bool,
) -> Callable[..., Sequence[float]]:
    """Compile the fields of PassCost, then those of relayout_cost, for SYMBOLS."""
    row = STRATEGIES[strategy]
    cost_of = row.cost if row.grouped is None or not grouped else row.grouped
    cost = cost_of(causal, layout, direction is Direction.BACKWARD)
    relayout = relayout_cost()
    if direction is Direction.BOTH:
        cost = cost.then(cost_of(causal, layout, True))
        relayout = tuple(2 * x for x in relayout)
    return evaluator(SYMBOLS, (*cost, *relayout))


def _mebibytes(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"
