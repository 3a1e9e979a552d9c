"""What a plan is charged for a layout is what its relayouts cost one by one."""

from __future__ import annotations

import pytest

from cpcompile.cost.hardware.profile import load_profile
from cpcompile.cost.model import relayout_cost
from cpcompile.cost.plans import Direction, Workload
from cpcompile.cost.relayout_cost import relayout_seconds
from cpcompile.cost.symbols import numbers
from cpcompile.geometry.degrees import CPDegrees


def workload(ranks: int) -> Workload:
    return Workload(
        batch=2, heads=16, kv_heads=4, q_len=1024, kv_len=1024, head_dim=64,
        value_dim=96, bytes_per_element=2, causal=True, direction=Direction.FORWARD,
        ranks=ranks,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 8, 16])
@pytest.mark.parametrize("hardware", ["h100", "cpu", "mi300x"])
def test_the_sum_of_four_values(hardware: str, ranks: int) -> None:
    """q, k, v and the output, as cancel_relayout counts them."""
    profile, call = load_profile(hardware), workload(ranks)
    values = numbers(call, CPDegrees(1, ranks), profile)
    seconds, _ = relayout_cost()
    found = float(seconds.subs(values))
    elements = [16 * 64, 4 * 64, 4 * 96, 16 * 96]  # heads times dim
    nbytes = [2 * 1024 * 2 * n / ranks for n in elements]
    wanted = sum(relayout_seconds(profile, ranks, n) for n in nbytes)
    assert found == pytest.approx(0.0 if ranks == 1 else wanted, rel=1e-12)
