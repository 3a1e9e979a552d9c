"""What a mask saves, and what it rules out, in the cost model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cpcompile.cost.choose import choose, predict
from cpcompile.cost.model import ring_cost, ulysses_cost
from cpcompile.cost.plans import Candidate, RingWork, Strategy, Workload
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout
from tests.unit.cost.cost_cases import H100, IDEAL, LLAMA, at

RANKS = 8
MASKED = replace(LLAMA, ranks=RANKS, causal=False, masked=True)


def form(load: Workload, strategy: Strategy, layout: Layout) -> Candidate:
    plan = choose(load, H100, layouts=(layout,), runnable=True)
    return next(c for c in plan.candidates if c.strategy is strategy)


@pytest.mark.parametrize("steps", [1, 2, 5, 8])
def test_a_ring_sends_for_the_steps_that_are_left(steps: int) -> None:
    """K and V for all steps but the first; dK and dV for all, with the way home."""
    sizes = {"ranks": RANKS, "ring_steps": steps}
    forward = ring_cost(False, Layout.CONTIGUOUS, False).wire_bytes
    backward = ring_cost(False, Layout.CONTIGUOUS, True).wire_bytes
    chunk = at(forward, ranks=2)  # of 2 ranks, in elements of 2 bytes
    chunk *= 2 / RANKS
    assert at(forward, **sizes) == pytest.approx((steps - 1) * chunk)
    sums = 2 * chunk * steps if steps > 1 else 0  # float32 where the model has 2 bytes
    assert at(backward, **sizes) == pytest.approx((steps - 1) * chunk + sums)


@pytest.mark.parametrize("steps", [1, 2, 8])
def test_steps_share_what_is_visible(steps: int) -> None:
    """What is computed depends on the pairs, not on how many steps have them."""
    cost = ring_cost(False, Layout.CONTIGUOUS, False)
    fast = replace(IDEAL, link_bytes_per_second=1e40)
    whole = at(cost.seconds, fast, ranks=RANKS)
    part = at(cost.seconds, fast, ranks=RANKS, ring_steps=steps, live_fraction=0.25)
    assert part == pytest.approx(whole / 4)
    assert at(cost.kernels, ranks=RANKS, ring_steps=steps) == steps


def test_a_window_makes_the_ring_cheaper() -> None:
    window = replace(MASKED, live_fraction=0.02, ring_steps=2)
    whole = form(MASKED, Strategy.RING, Layout.CONTIGUOUS)
    ring = form(window, Strategy.RING, Layout.CONTIGUOUS)
    assert ring.seconds and whole.seconds and ring.seconds < whole.seconds / 3
    long = replace(window, q_len=2**20, kv_len=2**20, live_fraction=0.002)
    assert choose(long, H100, runnable=True).strategy is Strategy.RING


def test_a_tensor_is_gathered_for_ulysses() -> None:
    size = 2**30
    loads = MASKED, replace(MASKED, bias_bytes=size)
    none, some = (form(x, Strategy.ULYSSES, Layout.CONTIGUOUS) for x in loads)
    assert none.peak_extra_bytes and some.peak_extra_bytes and none.wire_bytes
    assert some.wire_bytes == pytest.approx(none.wire_bytes + size * 7 / 8)
    assert some.peak_extra_bytes >= none.peak_extra_bytes + size
    assert none.seconds and some.seconds and some.seconds > none.seconds
    backward = ulysses_cost(False, Layout.CONTIGUOUS, True)
    sizes = {"ranks": RANKS, "bias_bytes": size, "degrees": CPDegrees(RANKS, 1)}
    assert at(backward.peak_extra_bytes, **sizes) > size
    assert at(backward.wire_bytes, **sizes) < size


def test_a_hybrid_exchanges_the_rows_of_its_ring() -> None:
    size, degrees = 2**30, CPDegrees(4, 2)
    loads = MASKED, replace(MASKED, bias_bytes=size)
    none, some = (
        predict(Candidate(Strategy.HYBRID, degrees), x, H100, 1e15) for x in loads
    )
    assert none.peak_extra_bytes and some.peak_extra_bytes and none.wire_bytes
    assert some.wire_bytes == pytest.approx(none.wire_bytes + size / 2 * 3 / 4)
    assert some.peak_extra_bytes == none.peak_extra_bytes + size / 2


def test_a_hybrid_is_charged_with_what_its_own_ring_sees() -> None:
    degrees, others = CPDegrees(4, 2), CPDegrees(2, 4)
    whole = replace(MASKED, live_fraction=0.5)
    window = replace(whole, hybrid_rings=(RingWork(degrees, 0.1, 1),))

    def seconds(load: Workload, degrees: CPDegrees) -> float:
        form = Candidate(Strategy.HYBRID, degrees)
        return predict(form, load, H100, 1e15).seconds or 0.0

    assert seconds(window, degrees) < seconds(whole, degrees) * 0.6
    assert seconds(window, others) == seconds(whole, others) > 0


@pytest.mark.parametrize(
    ("strategy", "layout", "bias_bytes", "why"),
    [
        (Strategy.RING, Layout.ZIGZAG, 0, None),
        (Strategy.ALL_GATHER, Layout.ZIGZAG, 0, None),
        (Strategy.RING, Layout.STRIPED, 0, "takes no mask but the causal one"),
        (Strategy.RING, Layout.FOLD, 0, "takes no mask but the causal one"),
        (Strategy.RING, Layout.ZIGZAG, 8, "lies in natural order"),
        (Strategy.ULYSSES, Layout.CONTIGUOUS, 8, None),
        (Strategy.HYBRID, Layout.CONTIGUOUS, 8, None),
        (Strategy.HYBRID, Layout.ZIGZAG, 8, "lies in natural order"),
    ],
)
def test_what_the_operators_can_run(
    strategy: Strategy, layout: Layout, bias_bytes: int, why: str | None
) -> None:
    load = replace(MASKED, bias_bytes=bias_bytes)
    plan = choose(load, H100, layouts=(Layout.CONTIGUOUS, layout), runnable=True)
    found = next(
        c for c in plan.candidates if c.strategy is strategy and c.layout is layout
    )
    assert (found.excluded is None) == (why is None)
    assert why is None or why in (found.excluded or "")
