"""Time of attention kernels, against pairs that are counted one by one."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import sympy

from cpcompile.cost import compute
from cpcompile.cost.symbols import B, D, E, F_bwd, F_fwd, Sk, Sq, h
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout, Runs
from tests.unit.cost.cost_cases import H100, IDEAL, RATES, at, positions, seen

BALANCED = (Layout.ZIGZAG, Layout.STRIPED, Layout.FOLD)
FLOPS_PER_PAIR = 2 * 2 * 8 * (64 + 32)
# Where seconds are pairs, forward.
COUNTING = replace(IDEAL, **dict.fromkeys(RATES, float(FLOPS_PER_PAIR)))


def steps(layout: Layout, **sizes: Any) -> tuple[float, float]:
    """Pairs of the first and of a later step of a causal ring."""
    found = compute.ring_step_seconds(True, layout, backward=False)
    first, later = (at(x, COUNTING, causal=True, **sizes) for x in found)
    return first, later


def counted(layout: Layout, length: int, ranks: int) -> list[list[int]]:
    """[rank][step] -> pairs of that step of the ring."""
    own = positions(length, ranks, layout)
    return [
        [seen(own[rank], own[(rank - step) % ranks]) for step in range(ranks)]
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(
    ("q_len", "kv_len", "ranks"),
    [(8, 8, 1), (8, 8, 2), (64, 64, 8), (48, 48, 3), (8, 24, 4), (24, 8, 4)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_pairs_of_the_last_rank(q_len, kv_len, ranks, causal) -> None:
    queries = range(q_len)[-(q_len // ranks) :]
    expected = len(queries) * kv_len
    if causal:
        expected = seen(list(queries), list(range(kv_len)))
    pairs = sum(compute.last_rank_pairs(causal))
    assert at(pairs, q_len=q_len, kv_len=kv_len, ranks=ranks) == expected
    assert at(pairs, length=15) == at(pairs, length=16)  # padded


@pytest.mark.parametrize(("length", "ranks"), [(64, 1), (64, 2), (96, 8), (96, 3)])
def test_contiguous_steps_are_those_of_the_last_rank(length: int, ranks: int) -> None:
    first, *later = counted(Layout.CONTIGUOUS, length, ranks)[-1]
    predicted = steps(Layout.CONTIGUOUS, length=length, ranks=ranks)
    assert predicted[0] == pytest.approx(first, rel=1e-12)
    assert later == [pytest.approx(predicted[1], rel=1e-12)] * (ranks - 1)


@pytest.mark.parametrize(("length", "ranks"), [(64, 2), (96, 4), (192, 8)])
@pytest.mark.parametrize("layout", BALANCED)
def test_balanced_steps(layout: Layout, length: int, ranks: int) -> None:
    chunk = length // ranks
    first, later = steps(layout, length=length, ranks=ranks)
    assert first == later
    pairs = counted(layout, length, ranks)
    # Every row may see one key more or less of a chunk than on average.
    assert pairs == [[pytest.approx(later, abs=chunk)] * ranks] * ranks
    # Brandon et al., arXiv 2311.09431: the diagonal is seen by the first ranks only.
    idle = (ranks - 1) / (ranks * (chunk + 1)) if layout is Layout.STRIPED else 0
    slowest = max(map(sum, pairs))
    assert ranks * later / slowest == pytest.approx(1 - idle, rel=1e-12)


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 4), (4, 2), (4, 3)])
def test_steps_of_a_ring_inside_of_ulysses(ulysses: int, ring: int) -> None:
    """The tokens of a rank are a run of each of `ulysses` neighbours."""
    length = 48 * ulysses
    runs = Runs(length, ring, length // (ulysses * ring), ulysses)
    own = [
        [
            token
            for piece in range(ulysses)
            for token in range(
                runs.start(rank, piece), runs.start(rank, piece) + runs.size
            )
        ]
        for rank in range(ring)
    ]
    expected = [seen(own[-1], own[-1 - step]) for step in range(ring)]
    found = compute.ring_step_seconds(True, Layout.CONTIGUOUS, backward=False)
    sizes = {"length": length, "ranks": ulysses * ring, "causal": True}
    sizes |= {"heads": 8 * ulysses, "kv_heads": 2 * ulysses}
    degrees = CPDegrees(ulysses, ring, "ring")
    first, later = (at(x, COUNTING, degrees, **sizes) for x in found)
    assert first == pytest.approx(expected[0], rel=1e-12)
    assert expected[1:] == [pytest.approx(later, rel=1e-12)] * (ring - 1)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("causal", [False, True])
def test_gathered_keys_give_the_pairs_of_all_steps(
    layout: Layout, causal: bool
) -> None:
    if not causal and layout is not Layout.CONTIGUOUS:
        return
    gathered = compute.gathered_seconds(causal, layout, backward=False)
    first, later = compute.ring_step_seconds(causal, layout, backward=False)
    sizes = {"length": 1024, "ranks": 8, "causal": causal}
    total = at(first, COUNTING, **sizes) + 7 * at(later, COUNTING, **sizes)
    assert at(gathered, COUNTING, **sizes) == pytest.approx(total, rel=1e-12)


def test_flops_and_idle_cores() -> None:
    none = sympy.Integer(0)
    sizes = {"value_dim": 64, "ranks": 1}
    pairs = at(B * h * Sq * Sk * D, **sizes)
    for backward, rate, flops in ((False, F_fwd, 4), (True, F_bwd, 10)):
        seconds = compute.kernel_seconds(Sq, Sq * Sk, none, backward)
        assert at(seconds * rate, IDEAL, **sizes) == pytest.approx(flops * pairs)
    step = compute.ring_step_seconds(False, Layout.CONTIGUOUS, backward=False)[1]
    launch = H100.kernel_launch_seconds
    # 8 and 16 tiles of rows for 132 cores: both fit beside each other.
    one, two = (at(step, batch=n, heads=1, kv_heads=1) - launch for n in (1, 2))
    assert one == pytest.approx(two)
    full, double = (at(step, batch=n, heads=32) - launch for n in (8, 16))
    assert double == pytest.approx(2 * full)


@pytest.mark.parametrize(
    ("causal", "rates", "close"),
    [
        (False, {512: 309, 1024: 350, 2048: 362, 16384: 370}, 0.05),
        # At 512 tokens 191 are measured; the model says 219.
        (True, {1024: 260, 2048: 298, 4096: 319, 16384: 335}, 0.04),
    ],
)
def test_small_sizes_lose_what_flash_attention_2_loses(causal, rates, close) -> None:
    """Curves of facts 1.1, H100, head dim 128, 2 x 16 heads, 16k tokens.

    Tiles on the diagonal are computed whole, of which live pairs count only.
    """
    pairs, edge = compute.last_rank_pairs(causal)
    seconds = compute.kernel_seconds(Sq, pairs, edge, False)
    found = []
    for length in rates:
        sizes = {"length": length, "batch": 16384 // length, "heads": 16, "ranks": 1}
        sizes |= {"head_dim": 128, "value_dim": 128, "causal": causal}
        flops = 2 * B * h * (pairs + edge) * (D + E)
        found.append(at(flops / seconds, **sizes) / 1e12)
    assert found == pytest.approx([*rates.values()], rel=close)
    assert all(short < long for short, long in pairwise(found))


@pytest.mark.parametrize(
    ("alone", "factor"),
    [(1.0, 1.0), (1.5, 1 / 1.5), (2.0, 2 / 3.5), (4.0, 2 / 3.5)],
)
def test_ranks_on_shared_cores_need_not_wait_for_the_last(
    alone: float, factor: float
) -> None:
    """Of 4 ranks the last has 3.5 blocks, and all together 8."""
    shared = replace(COUNTING, alone_speedup=alone)
    first, later = compute.ring_step_seconds(True, Layout.CONTIGUOUS, backward=False)
    gathered = compute.gathered_seconds(True, Layout.CONTIGUOUS, backward=False)
    for expression in (first + 3 * later, gathered):
        sizes = {"length": 1 << 20, "ranks": 4, "causal": True}
        slowest = at(expression, COUNTING, **sizes)
        found = at(expression, shared, **sizes)
        assert found / slowest == pytest.approx(factor, rel=1e-4)
    balanced = compute.ring_step_seconds(True, Layout.ZIGZAG, backward=False)[1]
    assert at(balanced, shared, causal=True) == at(balanced, COUNTING, causal=True)


@pytest.mark.parametrize("backward", [False, True])
def test_other_dtypes_take_longer(backward: bool) -> None:
    slower = replace(
        COUNTING, speed_of_16_bits=0.5, speed_of_32_bits=0.25, speed_of_64_bits=0.125
    )
    (first, _), times = compute.ring_step_seconds(True, Layout.ZIGZAG, backward), {}
    for size in (2, 4, 8):
        fast = at(first, COUNTING, causal=True, bytes_per_element=size)
        times[size] = at(first, slower, causal=True, bytes_per_element=size) / fast
    assert times[2] == pytest.approx(2)
    assert times[4] == pytest.approx(4 * H100.speed(4))
    assert times[8] == pytest.approx(8 * H100.speed(8))
