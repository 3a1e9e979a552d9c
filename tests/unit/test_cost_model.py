"""The cost model against brute force counts and published formulas."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import sympy
from expecttest import assert_expected_inline

from cpcompile.cost import model as m
from cpcompile.cost.hardware import load_profile
from cpcompile.layout import Chunks, live_pairs, visible_blocks
from cpcompile.plan import Workload


def workload(**changes: int | bool) -> Workload:
    fields: dict[str, int | bool] = {
        "batch": 2,
        "heads": 8,
        "kv_heads": 2,
        "q_len": 4096,
        "kv_len": 4096,
        "head_dim": 64,
        "value_dim": 32,
        "bytes_per_element": 2,
        "causal": False,
        "backward": False,
        "ranks": 4,
    }
    return Workload(**{**fields, **changes})


def at(expression: sympy.Expr, **changes: int | bool) -> float:
    """The expression with the numbers of a workload on one profile."""
    numbers = m.numbers(workload(**changes), load_profile("h100_sxm"))
    return float(compiled(expression)(*(numbers[symbol] for symbol in m.SYMBOLS)))


@cache
def compiled(expression: sympy.Expr) -> Callable[..., float]:
    return sympy.lambdify(m.SYMBOLS, expression, "math")


def counted_pairs(q_len: int, kv_len: int, ranks: int, causal: bool) -> list[int]:
    """Pairs that each rank really computes in the all-gather."""
    queries = Chunks(q_len, ranks)
    return [
        live_pairs(
            visible_blocks(queries.start(r), queries.count(r), 0, kv_len, causal)
        )
        for r in range(ranks)
    ]


def without_overheads(expression: sympy.Expr) -> sympy.Expr:
    """No latency, launches or merges, and an infinitely fast memory."""
    zeros = {m.alpha: 0, m.launch: 0, m.merge: 0}
    return expression.subs(zeros).subs(m.M, sympy.oo)


def wire_seconds(expression: sympy.Expr) -> sympy.Expr:
    """What is left when computation takes no time: bytes sent over bandwidth."""
    rates = (m.F_fwd, m.F_fwd_causal, m.F_bwd, m.F_bwd_causal)
    return without_overheads(expression).subs(dict.fromkeys(rates, sympy.oo))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "ranks"),
    [
        (8, 8, 1),
        (8, 8, 2),
        (64, 64, 8),
        (48, 48, 3),
        (1024, 1024, 16),
        (8, 24, 4),
        (24, 8, 4),
        (24, 16, 2),
    ],
)
def test_pairs_equal_those_of_the_slowest_rank(
    q_len: int, kv_len: int, ranks: int, causal: bool
) -> None:
    expected = max(counted_pairs(q_len, kv_len, ranks, causal))
    sizes = {"q_len": q_len, "kv_len": kv_len, "ranks": ranks}
    assert at(sum(m.last_rank_pairs(causal)), **sizes) == expected


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "ranks"), [(15, 4), (10, 4), (3, 8), (1001, 16)])
def test_uneven_lengths_are_charged_as_padded(
    length: int, ranks: int, causal: bool
) -> None:
    padded = -(-length // ranks) * ranks
    predicted = at(
        sum(m.last_rank_pairs(causal)), q_len=length, kv_len=length, ranks=ranks
    )
    assert predicted == max(counted_pairs(padded, padded, ranks, causal))
    assert predicted >= max(counted_pairs(length, length, ranks, causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "ranks"), [(64, 1), (64, 2), (96, 8)])
def test_ring_steps_equal_the_blocks_of_the_last_rank(
    length: int, ranks: int, causal: bool
) -> None:
    chunks = Chunks(length, ranks)
    last = ranks - 1
    counted = [
        live_pairs(
            visible_blocks(
                chunks.start(last),
                chunks.size,
                chunks.start((last - step) % ranks),
                chunks.size,
                causal,
            )
        )
        for step in range(ranks)
    ]
    first, later = m.ring_step_seconds(causal, backward=False)
    # At one FLOP per second for every pair, seconds are pairs.
    flops = 2 * m.B * m.H * (m.D + m.E)
    unit = {m.F_fwd: flops, m.F_fwd_causal: flops}
    sizes = {"q_len": length, "kv_len": length, "ranks": ranks}
    predicted = [at(without_overheads(x.subs(unit)), **sizes) for x in (first, later)]
    assert predicted[0] == pytest.approx(counted[0], rel=1e-12)
    assert counted[1:] == [pytest.approx(predicted[1], rel=1e-12)] * last


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_contiguous_causal_ring_loses_two_minus_one_over_n(ranks: int) -> None:
    # Pairs at one rate, so that only the imbalance is left; long, so that the
    # diagonal counts for nothing.
    pairs = sum(m.last_rank_pairs(True)).subs(m.Sk, m.Sq)
    balanced = m.Sq**2 / 2 / m.N
    loss = sympy.limit((pairs / balanced).subs(m.N, ranks), m.Sq, sympy.oo)
    assert loss == 2 - sympy.Rational(1, ranks)


def test_flops_are_four_per_pair_and_head_dim_and_ten_in_the_backward() -> None:
    square = {m.E: m.D}
    forward = m.attention_seconds(m.Sq * m.Sk, sympy.Integer(0), False) * m.F_fwd
    backward = m.attention_seconds(m.Sq * m.Sk, sympy.Integer(0), True) * m.F_bwd
    pairs = m.B * m.H * m.Sq * m.Sk * m.D
    assert sympy.simplify(forward.subs(square) - 4 * pairs) == 0
    assert sympy.simplify(backward.subs(square) - 10 * pairs) == 0


def hidden_from(transfer: sympy.Expr, computation: sympy.Expr) -> sympy.Expr:
    """Tokens per rank from which on a ring step hides its transfer."""
    chunk = sympy.Symbol("c", positive=True)
    balance = sympy.Eq(transfer, without_overheads(computation))
    balance = balance.subs({m.E: m.D, m.Sq: chunk * m.N, m.Sk: chunk * m.N})
    (solution,) = sympy.solve(balance, chunk)
    return sympy.simplify(solution)


def test_full_ring_hides_its_transfer_from_the_published_chunk_on() -> None:
    _, forward = m.ring_step_seconds(False, backward=False)
    tokens = hidden_from(m.e * m.KV / m.W, forward)
    assert_expected_inline(str(tokens), """F_fwd*G*e/(2*H*W)""")
    a100_peak = {m.F_fwd: 312e12, m.W: 300e9, m.e: 2, m.G: m.H}
    assert float(tokens.subs(a100_peak)) == pytest.approx(1040)
    h100_peak = {m.F_fwd: 989.4e12, m.W: 450e9, m.e: 2, m.G: m.H}
    assert float(tokens.subs(h100_peak)) == pytest.approx(2198, abs=1)


def test_backward_ring_needs_chunks_of_six_fifths() -> None:
    _, forward = m.ring_step_seconds(False, backward=False)
    _, backward = m.ring_step_seconds(False, backward=True)
    both_chunks = (m.e + 4) * m.KV / m.W  # dK and dV are float32
    ratio = hidden_from(both_chunks, backward) / hidden_from(m.e * m.KV / m.W, forward)
    assert ratio.subs({m.e: 2, m.F_bwd: m.F_fwd}) == sympy.Rational(6, 5)


@pytest.mark.parametrize("causal", [False, True])
def test_exposed_time_vanishes_where_the_chunk_is_long_enough(causal: bool) -> None:
    exposed = without_overheads(m.ring_exposed_seconds(causal, backward=False))
    sizes = {"kv_heads": 8, "value_dim": 64, "ranks": 8}
    profile = load_profile("h100_sxm")
    chunk = profile.forward_flops_per_second / profile.link_bytes_per_second
    if causal:  # the first step is half a block at the causal rate
        chunk *= 2
    short, long = 8 * round(chunk * 0.8), 8 * round(chunk * 1.2)
    assert at(exposed, q_len=short, kv_len=short, **sizes) > 0
    assert at(exposed, q_len=long, kv_len=long, **sizes) == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_bytes_on_the_wire(ranks: int, causal: bool) -> None:
    chunk = 2 * 2 * (4096 // ranks) * (64 + 32)  # elements of K and V, 2 of 8 heads
    kv_bytes = (ranks - 1) * chunk * 2
    gradient_hops = 0 if ranks == 1 else ranks
    sizes = {"ranks": ranks, "causal": causal}

    def sent(expression: sympy.Expr, bandwidth: sympy.Symbol) -> float:
        return at(wire_seconds(expression) * bandwidth, **sizes)

    ring = (m.ring_forward_seconds(causal), m.ring_backward_seconds(causal))
    assert sent(ring[0], m.W) == pytest.approx(kv_bytes)
    assert sent(ring[1], m.W) == pytest.approx(kv_bytes + gradient_hops * chunk * 4)
    gather = (
        m.all_gather_forward_seconds(causal),
        m.all_gather_backward_seconds(causal),
    )
    assert sent(gather[0], m.W_all) == pytest.approx(kv_bytes)
    assert sent(gather[1], m.W_all) == pytest.approx(3 * kv_bytes)  # 2, then 4 bytes


def ring_by_simulation(causal: bool, backward: bool, sizes: dict[str, int]) -> float:
    """The ring's exchange and computation step by step, as the operator runs them."""
    first, later = (at(x, **sizes) for x in m.ring_step_seconds(causal, backward))
    kv_hop = at(m.alpha + m.e * m.KV / m.W, **sizes)
    gradient_hop = at(m.alpha + m.SUM_BYTES * m.KV / m.W, **sizes)
    ranks = sizes["ranks"]
    seconds = 0.0
    for step in range(ranks):
        in_flight = kv_hop if step + 1 < ranks else 0.0
        if backward and step > 0:
            in_flight += gradient_hop
        seconds += max(first if step == 0 else later, in_flight)
    return seconds + (gradient_hop if backward and ranks > 1 else 0.0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [512, 16384, 131072])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_closed_form_of_the_ring_equals_its_steps(
    ranks: int, length: int, causal: bool
) -> None:
    length -= length % ranks
    sizes = {"q_len": length, "kv_len": length, "ranks": ranks}
    pack = at(2 * m.e * m.KV / m.M + m.PACK_LAUNCHES * m.launch, **sizes)
    cleared = at(m.SUM_BYTES * m.KV / m.M + m.launch, **sizes)
    forward = at(m.ring_forward_seconds(causal), **sizes)
    expected = ring_by_simulation(causal, False, sizes) + (pack if ranks > 1 else 0)
    assert forward == pytest.approx(expected, rel=1e-9)
    backward = at(m.ring_backward_seconds(causal), **sizes)
    expected = ring_by_simulation(causal, True, sizes) + pack + cleared
    assert backward == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("causal", [False, True])
def test_one_rank_exchanges_and_merges_nothing(causal: bool) -> None:
    forwards = [m.ring_forward_seconds(causal), m.all_gather_forward_seconds(causal)]
    ring, gather = (at(x, ranks=1) for x in forwards)
    assert ring == pytest.approx(gather, rel=1e-12)
    for backward in (False, True):
        assert at(m.ring_exposed_seconds(causal, backward), ranks=1) == 0
        assert at(m.all_gather_exposed_seconds(causal, backward), ranks=1) == 0
    float32 = {"ranks": 1, "bytes_per_element": 4}
    assert at(m.ring_peak_extra_bytes(causal, False), **float32) == 0
    assert at(m.all_gather_peak_extra_bytes(causal, False), **float32) == 0


def test_peak_extra_bytes() -> None:
    chunk, q, out = 2 * 2 * 1024 * (64 + 32), 2 * 8 * 1024 * 64, 2 * 8 * 1024 * 32
    ring, gather = m.ring_peak_extra_bytes, m.all_gather_peak_extra_bytes
    assert at(ring(False, False)) == 2 * chunk * 2 + 2 * out * 4
    assert at(ring(False, False), bytes_per_element=4) == 2 * chunk * 4 + out * 4
    assert at(ring(False, True)) == chunk * (3 * 2 + 2 * 4) + q * (2 + 4)
    assert at(gather(False, False)) == 2 * 4 * chunk * 2
    assert at(gather(False, True)) == 4 * chunk * (2 * 2 + 3 * 4) + q * 4


def test_memory_traffic_of_the_all_gather() -> None:
    chunk, q, gamma = 2 * 2 * 1024 * (64 + 32), 2 * 8 * 1024 * 64, 18
    flops = dict.fromkeys((m.F_fwd, m.F_bwd), sympy.oo)
    free = {m.alpha: 0, m.launch: 0, m.W_all: sympy.oo, m.merge: gamma} | flops
    join = 2 * 2 * chunk + 2 * 2 * 4 * chunk  # pack, then cat of 4 ranks: read, write
    forward = m.all_gather_forward_seconds(False).subs(free) * m.M
    assert at(forward) == pytest.approx(join)
    # dK and dV: cleared, added to, packed (read, write), stacked (read, write)
    gradients = 4 * chunk * (4 + gamma + 8 + 8)
    backward = m.all_gather_backward_seconds(False).subs(free) * m.M
    assert at(backward) == pytest.approx(join + gradients + gamma * q)


def test_grouped_heads_shrink_messages_and_not_computation() -> None:
    hop, (_, step) = m.e * m.KV / m.W, m.ring_step_seconds(False, backward=False)
    assert at(hop, kv_heads=8) == 4 * at(hop, kv_heads=2)
    assert at(step, kv_heads=8) == at(step, kv_heads=2)
