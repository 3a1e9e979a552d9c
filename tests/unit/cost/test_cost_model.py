"""Costs of whole passes: bytes sent, what is hidden, memory, and how they agree."""

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
    grouped_ulysses_cost,
    hybrid_cost,
    relayout_cost,
    ring_cost,
    steps_seconds,
    ulysses_cost,
)
from cpcompile.cost.plans import SEQUENCE_STRATEGIES, Direction, Strategy
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


def test_slow_networks_and_short_steps() -> None:
    # A byte costs the cores the same on every link; between nodes it is hidden.
    near, far = H100.link_bytes_per_second, H100.inter_node_bytes_per_second
    assert overlapped(H100, near) == H100.overlap_fraction < overlapped(H100, far) < 1
    lost = [(1 - overlapped(H100, rate)) / rate for rate in (near, far)]
    assert lost[0] == pytest.approx(lost[1])
    assert overlapped(H100, 2 * near) == H100.overlap_fraction
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


def test_formulas_are_evaluated():
    x, y = sympy.symbols("x y")
    part = sympy.Max(x, y, evaluate=False) ** 2
    formulas = (part + sympy.Rational(1, 4), part / 2, sympy.Integer(3), x)
    assert evaluator((x, y), formulas)(2.0, 3.0) == [9.25, 4.5, 3.0, 2.0]
    x = sympy.Symbol("x")
    with pytest.raises(TypeError, match=r"sin\(x\): sin is no operation"):
        evaluator((x,), (sympy.sin(x),))


EVEN = {"kv_heads": 4}  # one for every rank


def test_memory_of_the_ring_and_the_all_gather() -> None:
    (forward, backward), gathered = (
        [cost(True, CONTIGUOUS, x).peak_extra_bytes for x in (False, True)]
        for cost in (ring_cost, all_gather_cost)
    )
    # k and v sent and received, the sum, and the step's own output.
    assert at(forward) == 2 * KV * 2 + 2 * OUT * 4
    assert at(forward, bytes_per_element=4) == 2 * KV * 4 + OUT * 4
    # Beside them dk and dv, travelling and new; then the results, and the sum of dq.
    assert at(backward) == 2 * KV * 2 + 2 * KV * 4 + KV * 2 + Q * (2 + 4)
    assert at(forward, ranks=1, bytes_per_element=4) == 0
    assert at(gathered[0]) == 2 * 4 * KV * 2  # gathered and joined
    assert at(gathered[1]) == 4 * KV * (2 + 3 * 4) + Q * 4


def test_memory_of_ulysses() -> None:
    kv, qkv = KV * 2, Q + KV * 2  # 4 key heads
    forward, backward = (
        at(ulysses_cost(True, CONTIGUOUS, x).peak_extra_bytes, degrees=ULYSSES, **EVEN)
        for x in (False, True)
    )
    # q, k and v sent, received and unpacked; later they lie beside three outputs.
    assert forward == 2 * max(3 * qkv, qkv + 3 * OUT)
    # Gradients of the attention, sent, received and unpacked, or the attention itself:
    # q, k, v, out and dout, then dq, dk and dv, and the sum of dq.
    during = 2 * (qkv + 2 * OUT) + 2 * kv + (2 + 4) * Q
    assert backward == max(2 * 4 * qkv, during)
    # One of dk and dv of copied heads is summed in float32.
    copied = ulysses_cost(True, CONTIGUOUS, True).peak_extra_bytes
    assert at(copied, degrees=ULYSSES) == max(
        backward, 2 * 4 * qkv + 4 * (2 * 4 * 1024 * 64)
    )


def in_groups(backward: bool, count: int, **changes: Any) -> float:
    cost = grouped_ulysses_cost(True, CONTIGUOUS, backward)
    peak = cost.peak_extra_bytes
    return at(peak, degrees=ULYSSES, head_groups=count, **changes)


def test_memory_of_heads_in_groups() -> None:
    # Two of two heads of each rank, which read a head of keys each.
    kv = 4 * KV  # 8 key heads
    given = {"kv_heads": 8, "count": 2}
    # A group of q, k and v sent, received and unpacked; one output, another sent,
    # received and unpacked; and the first of the results.
    flying = (3 * (Q + kv) + 4 * OUT) // 2 + OUT
    assert in_groups(False, **given) == 2 * flying
    # Before a backward the other group stays.
    trained = in_groups(False, direction=Direction.BOTH, **given)
    assert trained == 2 * (flying + (Q + kv + OUT) // 2)
    # All that is saved, a group of dout sent, received and unpacked, and of gradients
    # that come too; with the sum of dq. At the end all of these, joined, and dq as its
    # product reads it.
    first = 2 * (Q + kv + OUT) + (2 * (3 * OUT + 4 * (Q + kv)) + 2 * kv + 6 * Q) // 2
    joined = 2 * (2 * (Q + kv) + max(Q, kv // 2))
    assert in_groups(True, **given) == max(first, joined)
    kv = 2 * KV  # 4 key heads, one for each rank
    given = {"kv_heads": 4, "count": 2}
    flying = (3 * Q + 4 * OUT) // 2 + 3 * kv + OUT
    assert in_groups(False, **given) == 2 * flying
    summed = 2 * kv  # dk and dv of this group and of those before
    first = 2 * (Q + kv + OUT + summed) + (2 * (3 * OUT + 4 * Q) + 2 * kv + 6 * Q) // 2
    joined = 2 * (2 * Q + kv + max(Q, kv // 2))
    assert in_groups(True, **given) == max(first, joined)


def test_memory_of_a_hybrid_is_that_of_its_ring_beside_what_was_exchanged() -> None:
    degrees, qkv = CPDegrees(2, 2), Q + KV  # half the heads of twice the tokens
    largest = 2 * max(3 * qkv, qkv + 3 * OUT), 2 * max(qkv + 4 * OUT, 4 * qkv)
    exchanged = 2 * (qkv + OUT), 2 * (qkv + 2 * OUT)
    for backward in (False, True):
        inside, found = (
            at(cost(True, CONTIGUOUS, backward).peak_extra_bytes, degrees=degrees)
            for cost in (ring_cost, hybrid_cost)
        )
        assert found == max(largest[backward], exchanged[backward] + inside)
