"""Costs of whole passes: bytes sent, what is hidden, memory, and how they agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sympy

from cpcompile.cost import model
from cpcompile.cost.evaluate import evaluator
from cpcompile.cost.hardware.profile import load_profile
from cpcompile.cost.model import (
    COPY_SECONDS,
    PassCost,
    all_gather_cost,
    hybrid_cost,
    relayout_cost,
    ring_cost,
    steps_seconds,
    ulysses_cost,
)
from cpcompile.cost.plans import SEQUENCE_STRATEGIES, Strategy
from cpcompile.cost.relayout_cost import relayout_seconds
from cpcompile.cost.strategies import STRATEGIES
from cpcompile.cost.symbols import SUM_BYTES, SYMBOLS, W, e, hop, numbers, overlapped
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout
from tests.support.pairwise import in_pairs
from tests.unit.cost.cost_cases import H100, IDEAL, NO_COMPUTATION, at, workload

CONTIGUOUS, ZIGZAG = Layout.CONTIGUOUS, Layout.ZIGZAG
KV = 2 * 2 * 1024 * (64 + 32)  # elements of k and v on one of 4 ranks
Q = 2 * 8 * 1024 * 64
OUT = 2 * 8 * 1024 * 32
ULYSSES = CPDegrees(4, 1)


def both(strategy: Strategy, causal: bool, layout: Layout = CONTIGUOUS) -> PassCost:
    """Forward and backward."""
    cost = STRATEGIES[strategy].cost
    return cost(causal, layout, False).then(cost(causal, layout, True))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_bytes_that_keys_and_values_travel(ranks: int) -> None:
    kv = KV * 4 // ranks
    gradient_hops = ranks if ranks > 1 else 0
    for cost, gradients in (
        (ring_cost, gradient_hops),  # the last one brings dK and dV home
        (all_gather_cost, ranks - 1),
    ):
        forward, backward = (
            at(cost(False, CONTIGUOUS, x).wire_bytes, ranks=ranks)
            for x in (False, True)
        )
        assert forward == (ranks - 1) * kv * 2
        assert backward == forward + gradients * kv * 4  # dK and dV are float32


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_of_the_all_to_all(ranks: int) -> None:
    """(2 h + 2 g) b c d (N - 1) / N elements, of equal head dims.

    Key heads are copied, so that every rank has one.
    """
    for kv_heads in (2, 8):
        sizes = {"value_dim": 64, "kv_heads": kv_heads, "ranks": ranks}
        heads = 2 * 8 + 2 * max(kv_heads, ranks)
        sent = heads * 2 * (4096 // ranks) * 64 * (ranks - 1) // ranks * 2
        for backward in (False, True):
            cost = ulysses_cost(False, CONTIGUOUS, backward)
            found = at(cost.wire_bytes, degrees=CPDegrees(ranks, 1), **sizes)
            assert found == sent


@pytest.mark.parametrize("strategy", SEQUENCE_STRATEGIES)
def test_transfers_are_bytes_over_bandwidth(strategy: Strategy) -> None:
    ulysses = {Strategy.ULYSSES: 4, Strategy.HYBRID: 2}.get(strategy, 1)
    rates = [
        *("link_bytes_per_second", "collective_bytes_per_second"),
        *("reduce_scatter_bytes_per_second", "all_to_all_bytes_per_second"),
    ]
    same = replace(IDEAL, **dict.fromkeys(rates, 1e9))
    cost = both(strategy, causal=True)
    sizes = {"degrees": CPDegrees(ulysses, 4 // ulysses), "causal": True}
    sent = at(cost.wire_bytes, same, **sizes)
    assert at(cost.transfer, same, **sizes) == pytest.approx(sent / 1e9)


def step_tokens(profile: Any, heads: int, kv_heads: int, backward: bool) -> float:
    """F e g / (2 W h) by hand; with float32 dK and dV (e + 4) of them for 2.5 times."""
    rate, factor = profile.forward_flops_per_second, 2 * kv_heads / (2 * heads)
    if backward:
        rate, factor = profile.backward_flops_per_second, factor * (2 + 4) / 2 / 2.5
    return float(rate / profile.link_bytes_per_second * factor)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize(
    ("causal", "layout", "factor"),
    [(False, CONTIGUOUS, 1), (True, ZIGZAG, 2), (True, Layout.STRIPED, 2)],
)
def test_a_ring_hides_its_transfers_from_the_published_chunk_on(
    causal: bool, layout: Layout, factor: int, kv_heads: int, backward: bool
) -> None:
    # One rate for all: what is left is the number of pairs of a step.
    profile = replace(
        IDEAL,
        causal_forward_flops_per_second=IDEAL.forward_flops_per_second,
        causal_backward_flops_per_second=IDEAL.backward_flops_per_second,
    )
    tokens = factor * step_tokens(profile, 8, kv_heads, backward)
    exposed = ring_cost(causal, layout, backward).exposed
    if backward:
        exposed -= hop + SUM_BYTES * model.KV / W  # the last hop of dK and dV
    found = [
        at(
            exposed,
            profile,
            length=8 * round(tokens * share),
            kv_heads=kv_heads,
            value_dim=64,
            ranks=8,
        )
        for share in (0.97, 1.03)
    ]
    assert found[0] > 0
    assert found[1] == pytest.approx(0, abs=1e-12)


def ring_by_simulation(
    causal: bool, layout: Layout, backward: bool, **sizes: Any
) -> float:
    """The ring step by step, as the operator runs it: no closed form."""
    first, later = (at(x, **sizes) for x in steps_seconds(causal, layout, backward))
    latency, ranks = at(hop, **sizes), sizes["ranks"]
    kv_seconds, gradient_seconds = (
        at(x * model.KV / W, **sizes) for x in (e, SUM_BYTES)
    )
    lost = 1 - H100.overlap_fraction
    seconds = 0.0
    for step in range(ranks):
        computed, messages = first if step == 0 else later, []
        if step + 1 < ranks:
            messages.append(kv_seconds)
        if backward and step > 0:
            messages.append(gradient_seconds)
        seconds += max(computed, sum(messages) + len(messages) * latency)
        seconds += lost * min(computed, sum(messages))
    return seconds + (latency + gradient_seconds if backward and ranks > 1 else 0.0)


@in_pairs(
    {
        "ranks": [1, 2, 3, 7],
        "length": [504, 16128, 131040],
        "layout": [CONTIGUOUS, ZIGZAG, Layout.STRIPED],
        "backward": [False, True],
    }
)
def test_closed_form_of_the_ring_equals_its_steps(
    ranks: int, length: int, layout: Layout, backward: bool
) -> None:
    sizes = {"length": length, "ranks": ranks}
    made_contiguous = at(COPY_SECONDS, **sizes) if ranks > 1 else 0.0
    found = at(ring_cost(True, layout, backward).seconds, **sizes)
    expected = ring_by_simulation(True, layout, backward, **sizes)
    assert found == pytest.approx(expected + made_contiguous, rel=1e-9)


def test_a_slow_network_leaves_the_cores_alone() -> None:
    """A byte costs the cores the same on every link; between nodes it is hidden."""
    near, far = H100.link_bytes_per_second, H100.inter_node_bytes_per_second
    assert overlapped(H100, near) == H100.overlap_fraction < overlapped(H100, far) < 1
    lost = [(1 - overlapped(H100, rate)) / rate for rate in (near, far)]
    assert lost[0] == pytest.approx(lost[1])
    assert overlapped(H100, 2 * near) == H100.overlap_fraction


def test_the_host_bounds_short_steps() -> None:
    issue = H100.step_issue_seconds
    found = at(ring_cost(True, ZIGZAG, False).seconds, length=64)
    assert found > 4 * issue
    assert at(ring_cost(True, ZIGZAG, False).seconds, length=64, ranks=1) < issue


@pytest.mark.parametrize("strategy", SEQUENCE_STRATEGIES)
@pytest.mark.parametrize("causal", [False, True])
def test_one_rank_exchanges_nothing(strategy: Strategy, causal: bool) -> None:
    sizes = {"ranks": 1, "causal": causal}
    cost = both(strategy, causal)
    for expression in (cost.exposed, cost.transfer, cost.wire_bytes):
        assert at(expression, **sizes) == 0
    forward = at(STRATEGIES[strategy].cost(causal, CONTIGUOUS, False).seconds, **sizes)
    alone = at(ring_cost(causal, CONTIGUOUS, False).seconds, **sizes)
    assert forward == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("layout", [CONTIGUOUS, ZIGZAG])
def test_a_hybrid_of_one_kind_is_that_kind(layout: Layout, backward: bool) -> None:
    hybrid = hybrid_cost(True, layout, backward)
    exchanged = ulysses_cost(True, layout, backward)
    if layout is CONTIGUOUS:
        found = (at(x.seconds, degrees=ULYSSES) for x in (hybrid, exchanged))
        assert next(found) == pytest.approx(next(found), rel=1e-12)
    alone = ring_cost(True, layout, backward)
    found = (at(x.seconds, degrees=CPDegrees(1, 4)) for x in (hybrid, alone))
    assert next(found) == pytest.approx(next(found), rel=1e-12)


def test_seconds_are_parts_that_are_named() -> None:
    """Exposed communication is contained in the seconds, once."""
    for strategy in SEQUENCE_STRATEGIES:
        cost, degrees = both(strategy, causal=True), CPDegrees(2, 2)
        seconds, exposed = (
            at(x, NO_COMPUTATION, degrees) for x in (cost.seconds, cost.exposed)
        )
        assert seconds == pytest.approx(exposed, rel=1e-9)
        assert exposed == pytest.approx(at(cost.transfer, NO_COMPUTATION, degrees))


@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
@pytest.mark.parametrize("hardware", ["h100", "cpu", "mi300x"])
def test_a_layout_moves_every_tensor_once_per_pass(hardware: str, ranks: int) -> None:
    """Charged is what the relayouts of q, k, v and the output cost one by one."""
    profile, (seconds, sent) = load_profile(hardware), relayout_cost()
    parts = [x * 4 * 2 / ranks for x in (Q, KV * 64 / 96, KV * 32 / 96, OUT)]
    share = (ranks - 1) / ranks
    assert at(sent, ranks=ranks) == pytest.approx(sum(parts) * share)
    alone = sum(relayout_seconds(profile, ranks, x) for x in parts) if ranks > 1 else 0
    assert at(seconds, profile, ranks=ranks) == pytest.approx(alone, rel=1e-12)
    if ranks <= 8:  # within a node
        expected = sum(parts) * share / IDEAL.all_to_all_bytes_per_second
        assert at(seconds, IDEAL, ranks=ranks) == pytest.approx(expected)


FORMULAS = [
    expression
    for strategy in SEQUENCE_STRATEGIES
    for backward in (False, True)
    for expression in STRATEGIES[strategy].cost(True, Layout.CONTIGUOUS, backward)
]


@pytest.mark.parametrize("machine", ["cpu", "h100_sxm", "mi300x"])
@pytest.mark.parametrize("tokens", [64, 8191, 2**20])
def test_every_cost(machine, tokens):
    load = workload(length=tokens, causal=True, ranks=8)
    found = numbers(load, CPDegrees(2, 4), load_profile(machine))
    given = [found[symbol] for symbol in SYMBOLS]
    exact = sympy.lambdify(SYMBOLS, FORMULAS, "mpmath", cse=True)(*given)
    got = evaluator(SYMBOLS, FORMULAS)(*given)
    assert got == pytest.approx([float(x) for x in exact], rel=1e-12)


def test_shared_parts_and_constants():
    x, y = sympy.symbols("x y")
    part = sympy.Max(x, y, evaluate=False) ** 2
    formulas = (part + sympy.Rational(1, 4), part / 2, sympy.Integer(3), x)
    assert evaluator((x, y), formulas)(2.0, 3.0) == [9.25, 4.5, 3.0, 2.0]


def test_another_operation_is_refused():
    x = sympy.Symbol("x")
    with pytest.raises(TypeError, match=r"sin\(x\): sin is no operation"):
        evaluator((x,), (sympy.sin(x),))
