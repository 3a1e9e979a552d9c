"""Run one candidate on the clocks of its ranks, by the cost model's numbers.

Note [The clocks of a ring]
Rank a starts step t + 1 when it has computed step t and the chunk from rank a - 1 has
arrived, which leaves once both have started step t. Under contiguous causal attention
ranks with fewer visible chunks compute less and wait more. The last rank to end ends
at the predicted time: work is bounded by the last rank's, which the model charges, and
whoever it waits for has as much to compute until then. Forward and backward are drawn
as starting on all ranks together.
"""

from __future__ import annotations

import numpy as np

from cpcompile.cost import all_gather, latents, ring, split_kv, ulysses
from cpcompile.cost.compute import (
    ROWS,
    gathered_seconds,
    kernel_seconds,
    ring_step_seconds,
)
from cpcompile.cost.hardware.profile import HardwareProfile
from cpcompile.cost.plans import Candidate, Direction, Strategy, Workload
from cpcompile.cost.strategies import STRATEGIES
from cpcompile.cost.symbols import (
    SEVERAL,
    SEVERAL_R,
    SUM_BYTES,
    Sk,
    Sq,
    W,
    e,
    hop,
    launch,
    overlap,
    parts,
    pieces,
    smaller,
)
from cpcompile.geometry.layout import Layout
from cpcompile.reporting.drawing.simulated_clocks import (
    KERNEL,
    Activity,
    Clock,
    SimulatedRun,
    Timeline,
)


def timeline(
    candidate: Candidate, workload: Workload, profile: HardwareProfile, rows: int = 16
) -> Timeline:
    """Simulate when `candidate`, of a plan of `workload` and `profile`, does what.

    Raises: ValueError for a strategy whose clocks are not known here.
    """
    simulate = _SIMULATED.get(candidate.strategy)
    if simulate is None:
        raise ValueError(
            f"timeline: got the strategy {candidate.strategy.value!r}; needed one of "
            f"{[known.value for known in _SIMULATED]}"
        )
    run = SimulatedRun(candidate, workload, profile, rows)
    for backward in (False, True):
        if workload.direction in (
            Direction.BOTH,
            Direction.BACKWARD if backward else Direction.FORWARD,
        ):
            run.name = "backward" if backward else "forward"
            simulate(run, backward)
            run.meet()
    return run.result()


def _ring(run: SimulatedRun, backward: bool) -> None:
    """Simulate a ring, a ring inside a hybrid's all-to-all, or an all-to-all alone."""
    relayout = _relayout_seconds(run)
    sent = ulysses.OUTPUT if backward else ulysses.QKV
    share = run.value(sent / ulysses.SENT)  # the part sent before the attention
    transfer = run.value(ulysses.exchange_transfer_seconds())
    copies = run.value(ulysses.exchange_seconds(backward)) - transfer
    run.communicate(share * relayout, "layout is made")
    run.compute(share * copies, "copies for the all-to-all")
    run.communicate(share * transfer, "all-to-all")
    if not STRATEGIES[run.candidate.strategy].runs_steps:
        step, _ = ring_step_seconds(run.workload.causal, Layout.CONTIGUOUS, backward)
        run.compute(run.value(step), "attention")
    else:
        _ring_steps(run, backward)
    run.communicate((1 - share) * transfer, "all-to-all")
    run.compute((1 - share) * copies, "copies for the all-to-all")
    run.communicate((1 - share) * relayout, "layout is undone")


def _ulysses(run: SimulatedRun, backward: bool) -> None:
    """Simulate an all-to-all of all heads, or groups of them, one after the other."""
    groups = run.candidate.head_groups
    if groups == 1:
        _ring(run, backward)
        return
    relayout = _relayout_seconds(run)
    sent = ulysses.OUTPUT if backward else ulysses.QKV
    share = run.value(sent / ulysses.SENT)
    step, _ = ring_step_seconds(run.workload.causal, Layout.CONTIGUOUS, backward)
    step += (parts - 1) * launch
    attention = run.value(step) / groups
    transfer = run.value(ulysses.grouped_transfer_seconds()) / groups
    exposed = run.value(ulysses.grouped_exposed_seconds(step))
    waited = (exposed - transfer) / (groups - 1)
    run.communicate(share * relayout, "layout is made")
    run.compute(run.value(ulysses.grouped_copy_seconds(backward)), "copies of heads")
    run.communicate(share * transfer, "all-to-all")
    for group in range(groups):
        if group < groups - 1:
            run.message(run.now, transfer, "all-to-all of other heads")
        run.compute(attention, f"attention, group {group}")
        if group < groups - 1:
            run.advance(Activity.COMMUNICATION, run.now + waited, "all-to-all")
    run.communicate((1 - share) * transfer, "all-to-all")
    run.communicate((1 - share) * relayout, "layout is undone")


def _ring_steps(run: SimulatedRun, backward: bool) -> None:
    """Simulate the steps of a ring; see Note [The clocks of a ring]."""
    first, later, fewer = _step_seconds(run, backward)
    size, hidden, latency = run.positions, run.value(overlap), run.value(hop)
    kv_hop, gradient_hop = run.value(hop + e * ring.KV / W), 0.0
    if backward:
        gradient_hop = run.value(hop + SUM_BYTES * ring.KV / W)
    run.compute(run.value(SEVERAL_R * ring.copy_seconds()), "copies k and v")
    position = np.arange(size)
    for step in range(size):
        seconds = np.where(position >= step, first if step == 0 else later, fewer)
        transfer = kv_hop * (step < size - 1) + gradient_hop * (step > 0)
        messages = (step < size - 1) + (backward and step > 0)
        sending = transfer - messages * latency
        slowed = (1 - hidden) * np.minimum(sending, seconds)
        begin = np.maximum(run.now, np.roll(run.now, 1))
        ready = run.now + seconds
        what = f"step {step}"
        run.message(begin, transfer, what)
        run.compute(seconds, what)
        if transfer > 0:
            next_ = np.maximum(ready, begin + transfer) + slowed
            run.advance(Activity.IDLE, np.minimum(begin, next_), what)
            run.advance(Activity.COMMUNICATION, next_, what)
    if backward and size > 1:
        begin = np.maximum(run.now, np.roll(run.now, 1))
        run.message(begin, gradient_hop, "dK and dV go home")
        run.advance(Activity.IDLE, begin, "dK and dV go home")
        run.communicate(gradient_hop, "dK and dV go home")


def _step_seconds(run: SimulatedRun, backward: bool) -> tuple[float, float, float]:
    """Return seconds of the first step, a later one, one with keys after the rows."""
    causal, layout = run.workload.causal, run.candidate.layout
    first, later = (run.value(x) for x in ring.steps_seconds(causal, layout, backward))
    if not causal or layout is not Layout.CONTIGUOUS:
        return first, later, later
    runs = run.value(pieces)
    if runs == 1:
        return first, later, 0.0
    # Of p * p pairs of runs a rank sees p (p - 1) / 2, where others see p (p + 1) / 2.
    rows, keys = run.value(ROWS), run.value(smaller(Sq, Sk)) / run.positions
    kernel = kernel_seconds(KERNEL[0], KERNEL[1], KERNEL[2], backward)
    full = run.value(ring_step_seconds(causal, layout, backward)[1])
    part = run.value(kernel, rows * (1 - 1 / runs), rows * keys * (1 - 1 / runs) / 2, 0)
    return first, later, min(later, max(0.0, later - full + part))


def _all_gather(run: SimulatedRun, backward: bool) -> None:
    """Simulate collectives, which all ranks enter together, and one attention."""
    causal, layout = run.workload.causal, run.candidate.layout
    relayout = _relayout_seconds(run)
    share = run.value(ulysses.QKV / ulysses.SENT)
    slowest = run.value(gathered_seconds(causal, layout, backward))
    attention = _gathered_seconds(run, backward)
    gather = run.value(all_gather.all_gather_transfer_seconds(False))
    join = run.value(SEVERAL * all_gather.joined_seconds())
    run.communicate(share * relayout, "layout is made")
    run.communicate(gather, "all-gather")
    run.compute(join, "joins k and v")
    run.compute(attention, "attention")
    if backward:
        total = run.value(all_gather.all_gather_backward_seconds(causal, layout))
        both = run.value(all_gather.all_gather_transfer_seconds(True))
        run.compute(total - both - join - slowest, "packs dK and dV")
        run.meet()
        run.communicate(both - gather, "reduce-scatter")
    run.communicate((1 - share) * relayout, "layout is undone")


def _latents(run: SimulatedRun, backward: bool) -> None:
    """Simulate collectives of latents, the keys made of them, and one attention."""
    relayout = _relayout_seconds(run)
    share = run.value(ulysses.QKV / ulysses.SENT)
    gather = run.value(latents.latents_transfer_seconds(False))
    join = latents.joined_seconds()
    repeated = latents.repeated_seconds()
    made = latents.made_seconds() if backward else repeated
    run.communicate(share * relayout, "layout is made")
    run.communicate(gather, "all-gather")
    run.compute(run.value(SEVERAL * (join + made)), "computes k and v")
    run.compute(_gathered_seconds(run, backward), "attention")
    if backward:
        gradients = join + latents.BACKWARD_PER_FORWARD * repeated
        run.compute(run.value(SEVERAL * gradients), "gradients of the latents")
        run.meet()
        both = run.value(latents.latents_transfer_seconds(True))
        run.communicate(both - gather, "reduce-scatter")
    run.communicate((1 - share) * relayout, "layout is undone")


def _split_kv(run: SimulatedRun, _backward: bool) -> None:
    """Simulate attention to the keys of each rank, and one collective."""
    attention = run.value(split_kv.partial_seconds())
    transfer = run.value(split_kv.split_kv_transfer_seconds())
    total = run.value(split_kv.split_kv_seconds())
    run.compute(attention, "attention")
    run.communicate(transfer, "all-gather")
    run.compute(total - attention - transfer, "merges the results")


def _gathered_seconds(run: SimulatedRun, backward: bool) -> Clock:
    """Return the seconds of every rank's attention to all keys.

    With fewer keys than queries the first rank may have more to do than the last, which
    is the one that the model charges.
    """
    causal, layout = run.workload.causal, run.candidate.layout
    ranks, slowest = (
        run.positions,
        run.value(gathered_seconds(causal, layout, backward)),
    )
    if not causal or layout is not Layout.CONTIGUOUS:
        return np.full(ranks, slowest)
    rows, keys = run.value(ROWS), run.value(Sk)
    kernel = kernel_seconds(KERNEL[0], KERNEL[1], KERNEL[2], backward)
    seconds = []
    for rank in range(ranks):
        before = min(rank * rows, keys)
        side = min((rank + 1) * rows, keys) - before
        triangle = side * (side + 1) / 2 + (rows - side) * side
        seconds.append(run.value(kernel, rows, rows * before, triangle))
    clock: Clock = np.minimum(np.array(seconds), slowest)
    return clock


def _relayout_seconds(run: SimulatedRun) -> float:
    if not run.candidate.relayout:
        return 0.0
    return run.value(ulysses.relayout_seconds())


_SIMULATED = {
    Strategy.RING: _ring,
    Strategy.ALL_GATHER: _all_gather,
    Strategy.ULYSSES: _ulysses,
    Strategy.HYBRID: _ring,
    Strategy.LATENTS: _latents,
    Strategy.SPLIT_KV: _split_kv,
}
