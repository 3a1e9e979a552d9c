"""What masks and latents save, cost and rule out, in the cost model."""

from dataclasses import replace

import pytest

import cpcompile as cp
from cpcompile.cost.choose import choose, predict
from cpcompile.cost.latents import latent_prices
from cpcompile.cost.model import ring_cost, ulysses_cost
from cpcompile.cost.plans import (
    Candidate,
    Direction,
    Latents,
    RingWork,
    Strategy,
    Workload,
)
from cpcompile.cost.strategies import STRATEGIES
from cpcompile.errors import RewriteError
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout
from tests.unit.cost.cost_cases import H100, IDEAL, LLAMA, NO_COMPUTATION, at

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


def test_what_a_ring_sees_of_a_window() -> None:
    window = replace(MASKED, live_fraction=0.02, ring_steps=2)
    whole = form(MASKED, Strategy.RING, Layout.CONTIGUOUS)
    ring = form(window, Strategy.RING, Layout.CONTIGUOUS)
    assert ring.seconds and whole.seconds and ring.seconds < whole.seconds / 3
    long = replace(window, q_len=2**20, kv_len=2**20, live_fraction=0.002)
    assert choose(long, H100, runnable=True).strategy is Strategy.RING
    degrees, others = CPDegrees(4, 2), CPDegrees(2, 4)
    whole = replace(MASKED, live_fraction=0.5)
    window = replace(whole, hybrid_rings=(RingWork(degrees, 0.1, 1),))

    def seconds(load: Workload, degrees: CPDegrees) -> float:
        form = Candidate(Strategy.HYBRID, degrees)
        return predict(form, load, H100, 1e15).seconds or 0.0

    assert seconds(window, degrees) < seconds(whole, degrees) * 0.6
    assert seconds(window, others) == seconds(whole, others) > 0


def test_tensors_are_gathered_and_exchanged() -> None:
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
    size, degrees = 2**30, CPDegrees(4, 2)
    loads = MASKED, replace(MASKED, bias_bytes=size)
    none, some = (
        predict(Candidate(Strategy.HYBRID, degrees), x, H100, 1e15) for x in loads
    )
    assert none.peak_extra_bytes and some.peak_extra_bytes and none.wire_bytes
    assert some.wire_bytes == pytest.approx(none.wire_bytes + size / 2 * 3 / 4)
    assert some.peak_extra_bytes == none.peak_extra_bytes + size / 2


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


# DeepSeek-V3: 128 heads, k 192 and v 128 wide, made of 576 numbers a token.
MLA = {"heads": 128, "kv_heads": 128, "head_dim": 192, "value_dim": 128}
MADE = 128 * (192 + 128)
SOURCES = Latents(values=1, bytes=576 * 2, flops=2 * 576 * MADE, moved=0)
CALL = replace(LLAMA, **MLA, latents=SOURCES)


def candidate(call: Workload, profile=NO_COMPUTATION, strategy=Strategy.LATENTS):
    return choose(call, profile, strategy=strategy).chosen


def test_bytes_and_prices_of_latents() -> None:
    # Each way once in the forward, and twice in the backward.
    for direction, times in ((Direction.FORWARD, 1), (Direction.BOTH, 3)):
        call = replace(CALL, direction=direction)
        of_others = call.kv_len * 576 * 2 * (call.ranks - 1) / call.ranks
        assert candidate(call).wire_bytes == times * round(of_others)
    keys = candidate(CALL, strategy=Strategy.ALL_GATHER).wire_bytes
    assert keys / candidate(CALL).wire_bytes == pytest.approx(MADE / 576)
    prices = latent_prices(CALL, H100)
    before = candidate(CALL, H100)
    for field, price, more in (
        ("values", prices.value, 1),
        ("bytes", prices.byte, 64),
        ("flops", prices.flop, 1e6),
        ("moved", prices.moved, 512),
    ):
        grown = replace(SOURCES, **{field: getattr(SOURCES, field) + more})
        after = candidate(replace(CALL, latents=grown), H100)
        assert after.seconds - before.seconds == pytest.approx(price * more)


def test_work_is_done_again_on_every_rank() -> None:
    """The forward's on every rank; the backward's twice that, and once more."""
    free = replace(IDEAL, forward_flops_per_second=1e12)
    call = replace(CALL, q_len=8, causal=False)  # whose attention is nothing beside it
    whole = call.kv_len * SOURCES.flops / 1e12
    share = 1 - 1 / call.ranks
    for direction, times in (
        (Direction.FORWARD, share),
        (Direction.BACKWARD, 1 + 2 * share),
        (Direction.BOTH, 1 + 3 * share),
    ):
        own = replace(call, direction=direction)
        less = replace(own, latents=replace(SOURCES, flops=0))
        more = [candidate(x, free).seconds for x in (own, less)]
        assert more[0] - more[1] == pytest.approx(times * whole)


def test_who_has_it_and_where_it_is_best() -> None:
    named = {c.strategy for c in choose(LLAMA, H100).candidates}
    assert Strategy.LATENTS not in named
    with pytest.raises(RewriteError, match="k and v are not made, token by token"):
        choose(LLAMA, H100, strategy=Strategy.LATENTS)
    cost = STRATEGIES[Strategy.LATENTS].cost(True, Layout.CONTIGUOUS, True)
    gathered = STRATEGIES[Strategy.ALL_GATHER].cost(True, Layout.CONTIGUOUS, True)
    call = replace(CALL, ranks=1)
    alone = [candidate(call, H100, s) for s in (Strategy.LATENTS, Strategy.ALL_GATHER)]
    assert alone[0].seconds == pytest.approx(alone[1].seconds)
    assert cost.kernels == gathered.kernels
    # Between nodes, and not where heads are exchanged within one.
    assert plan(ranks_per_node=1).strategy is Strategy.LATENTS
    assert plan(ranks_per_node=8).strategy is Strategy.ULYSSES
    with pytest.raises(ValueError, match="latent_dim is 0; needed a positive integer"):
        plan(latent_dim=0)


def plan(**changes):
    sizes = {"batch": 1, "seq": 16384, "ranks": 8, "latent_dim": 576}
    return cp.plan(**(MLA | sizes | changes))
