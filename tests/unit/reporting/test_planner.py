"""`cp.plan`: what it passes on, and what it says to wrong arguments."""

from __future__ import annotations

from typing import Any

import pytest

import cpcompile as cp
from cpcompile.cost.plans import Direction, Plan
from cpcompile.geometry.layout import Layout

SIZES = {
    "batch": 1,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "seq": 65536,
    "ranks": 8,
}


def plan(**changes: Any) -> Plan:
    return cp.plan(**{**SIZES, **changes})


def refusal(**changes: Any) -> str:
    with pytest.raises(ValueError) as caught:
        plan(**changes)
    return str(caught.value)


def test_the_workload_is_what_was_asked_for() -> None:
    found = plan(dtype="float32", causal=False, direction="forward", kv_seq=4096)
    workload = found.workload
    assert (workload.batch, workload.heads, workload.kv_heads) == (1, 32, 8)
    assert (workload.q_len, workload.kv_len) == (65536, 4096)
    assert (workload.head_dim, workload.value_dim) == (128, 128)
    assert (workload.bytes_per_element, workload.causal) == (4, False)
    assert (workload.direction, workload.ranks) == (Direction.FORWARD, 8)
    assert found.hardware == "h100_sxm"
    assert not found.forced


def test_by_default_training_in_all_layouts_is_compared() -> None:
    found = plan()
    assert plan(dtype="torch.bfloat16") == found == plan(dtype="bfloat16")
    assert found.workload.direction is Direction.BOTH
    assert found.workload.bytes_per_element == 2
    layouts = {c.layout for c in found.candidates}
    assert layouts == {Layout.CONTIGUOUS, Layout.ZIGZAG, Layout.STRIPED}
    assert {c.layout for c in plan(causal=False).candidates} == {Layout.CONTIGUOUS}
    assert {c.layout for c in plan(layout="fold").candidates} == {Layout.FOLD}


@pytest.mark.parametrize("value", [0, -1, 2.0, "8", True])
@pytest.mark.parametrize("name", [*SIZES, "ranks_per_node", "kv_seq", "value_dim"])
def test_sizes_are_positive_integers(name: str, value: object) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"cp.plan: {name} is {value!r}; needed a positive")


IMPOSSIBLE = "cp.plan: every strategy is impossible here: "


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_budget": 1 << 20}, f"{IMPOSSIBLE}ulysses in 4 groups of heads needs "
         "392.0 MiB of extra memory per rank, and the budget is 1.0 MiB; that is the "
         "smallest need: raise memory_budget, or use more ranks"),
        ({"kv_heads": 5}, f"{IMPOSSIBLE}32 query heads are not a multiple of 5 "
         "key/value heads; repeat the key/value heads in the model"),
        ({"causal": False, "layout": "zigzag"},
         f"{IMPOSSIBLE}zigzag balances causal attention only"),
        ({"dtype": "int8"}, "cp.plan: dtype is 'int8'; needed one of float64, float32, "
         "bfloat16, float16"),
        ({"direction": "sideways"}, "cp.plan: direction is 'sideways'; needed one of "
         "forward, backward, both"),
        ({"layout": "spiral"}, "cp.plan: layout is 'spiral'; needed one of auto, "
         "contiguous, zigzag, striped, fold"),
        ({"overrides": {"speed": 1.0}},
         "overrides: field 'speed' is unknown; did you mean 'alone_speedup'?"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned(changes: dict[str, Any], message: str) -> None:
    assert refusal(**changes) == message
    assert "did you mean 'a100_sxm'?" in refusal(hardware="a10")
