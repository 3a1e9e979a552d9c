"""Why candidates are out, and what is said if none is left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from expecttest import assert_expected_inline

from cpcompile.cost.choose import choose
from cpcompile.cost.plans import SEQUENCE_STRATEGIES, Direction
from cpcompile.errors import RewriteError
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout
from tests.unit.cost.cost_cases import H100, LLAMA

RING, ALL_GATHER, ULYSSES, HYBRID = SEQUENCE_STRATEGIES


def budgeted(mib: int, **options: Any) -> dict[str, Any]:
    return {"memory_budget": mib << 20, **options}


HEADS = (
    "32 query heads are not a multiple of 5 key/value heads; repeat the key/value "
    "heads in the model"
)
LEAST = (
    "of extra memory per rank, and the budget is 1.0 MiB; that is the smallest need: "
    "raise memory_budget, or use more ranks"
)


@pytest.mark.parametrize(
    ("changes", "options", "text"),
    [
        (
            {},
            {"strategy": HYBRID, "degrees": CPDegrees(3, 2)},
            "strategy hybrid is impossible here: 3 in 2 (ring) are 6 ranks, and there "
            "are 8; give two factors of 8",
        ),
        (
            {"ranks": 7},
            {"strategy": HYBRID},
            "strategy hybrid is impossible here: 7 ranks have no two factors",
        ),
        ({"kv_heads": 5}, {}, f"every strategy is impossible here: {HEADS}"),
        (
            {"kv_heads": 5},
            {"strategy": RING},
            f"strategy ring is impossible here: {HEADS}",
        ),
        (
            {},
            budgeted(1),
            "every strategy is impossible here: ulysses in 4 groups of heads needs "
            f"34.0 MiB {LEAST}",
        ),
        (
            {},
            budgeted(1, strategy=ALL_GATHER),
            "strategy all_gather is impossible here: all_gather needs 64.0 MiB "
            f"{LEAST}",
        ),
        (  # no groups where ranks have other numbers of heads
            {"heads": 20, "kv_heads": 20, "direction": Direction.BOTH},
            budgeted(1, strategy=ULYSSES),
            "strategy ulysses is impossible here: ulysses needs",
        ),
    ],
)
def test_what_is_said_if_nothing_is_left(changes, options, text) -> None:
    with pytest.raises(RewriteError) as caught:
        choose(replace(LLAMA, **changes), H100, **options)
    message = str(caught.value)
    assert message == text or (text.endswith("needs") and message.startswith(text))


def test_more_ranks_than_heads() -> None:
    """No reason to be out: heads are padded, and what that costs is charged."""
    few = replace(LLAMA, heads=2, kv_heads=1, q_len=2**17, kv_len=2**17)
    plan = choose(few, H100, layouts=(Layout.ZIGZAG,))
    assert {c.excluded for c in plan.candidates} == {None}
    ulysses = next(c for c in plan.candidates if c.strategy is ULYSSES)
    # 6 of 8 ranks attend to nothing but zeros.
    loss = (ulysses.seconds or 0) / (plan.chosen.seconds or 1)
    assert loss == pytest.approx(8 / 2, rel=0.05)


def test_a_memory_budget_excludes_and_keeps_the_cost() -> None:
    free = choose(LLAMA, H100)
    least = min(c.peak_extra_bytes or 0 for c in free.candidates)
    plan = choose(LLAMA, H100, memory_budget=least)
    possible = [c for c in plan.candidates if c.excluded is None]
    assert {c.peak_extra_bytes for c in possible} == {least}
    tight = next(c for c in plan.candidates if c.excluded is not None)
    assert tight.seconds is not None
    assert_expected_inline(
        f"{tight.label}: {tight.excluded}",
        """ring: needs 40.0 MiB of extra memory per rank, and the budget is 36.0 MiB""",
    )
