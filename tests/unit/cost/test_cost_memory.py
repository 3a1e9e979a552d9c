"""Peak memory of every strategy, counted by hand from the tensors of its operators."""

from __future__ import annotations

from typing import Any

from cpcompile.cost.model import (
    all_gather_cost,
    grouped_ulysses_cost,
    hybrid_cost,
    ring_cost,
    ulysses_cost,
)
from cpcompile.cost.plans import Direction
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout
from tests.unit.cost.cost_cases import at

CONTIGUOUS = Layout.CONTIGUOUS
KV = 2 * 2 * 1024 * (64 + 32)  # elements of k and v on one of 4 ranks
Q = 2 * 8 * 1024 * 64
OUT = 2 * 8 * 1024 * 32
ULYSSES = CPDegrees(4, 1)
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
    """Two of two heads of each rank, which read a head of keys each."""
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


def test_memory_of_groups_that_read_the_same_keys() -> None:
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
