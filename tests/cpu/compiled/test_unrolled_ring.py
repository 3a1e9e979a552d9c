"""A ring that Inductor sees as steps equals the ring that runs them in a loop.

Every message is proven to be hidden in the code of every rank, and none is left behind.
References and tolerances are those of Note [Derived tolerances].
"""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cpcompile import config
from cpcompile.compile import compile_local as inductor
from cpcompile.compile.overlap import check_overlap
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import (
    Attended,
    AttentionCase,
    check_case,
    grid,
    run_case,
    run_on_grid,
)
from tests.cpu.length_cases import check as check_lengths
from tests.cpu.length_cases import run as run_lengths
from tests.support.pairwise import selected_cases

AXES = {
    "world": (2, 3, 4),
    "seq": (48, 37),  # 37 tokens are uneven chunks of all of these
    "causal": (True, False),
    "kv_heads": (4, 2),
    "dtype": (torch.float32, torch.bfloat16),
    "dynamic": (False, True),
}

# No chunk of 48 or 37 tokens is as long: to Dynamo equal sizes are one symbol, and the
# width of heads, which kernels fix, would fix the length, which is then compiled twice.
HEAD_DIM = 8


@dataclasses.dataclass(frozen=True)
class Ran:
    """What one rank saw of a compiled attention, at one length."""

    attended: Attended | None
    shifts: tuple[int, ...]  # in the code of forward and backward
    works_left: int


def attend(case: AttentionCase, dynamic: bool, **options):
    """What a user compiles."""
    causal, grouped = case.causal, case.heads != case.kv_heads

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, enable_gqa=grouped
        )

    options = {"strategy": case.strategy, **options}
    return torch.compile(
        attention, backend="cp", fullgraph=True, dynamic=dynamic, options=options
    )


def lengths(case: AttentionCase) -> list[AttentionCase]:
    """Two lengths in a row; one is even and one is not."""
    return [case, dataclasses.replace(case, seq=48 + 37 - case.seq)]


def run(case: AttentionCase, unroll: int, dynamic: bool) -> list[Ran]:
    """Forward and gradients at every length, by one compiled function."""
    torch._dynamo.reset()
    names = grid(case.inner).mesh_dim_names if case.strategy == "hybrid" else "cp"
    function = attend(case, dynamic, axis=names)
    found: list[int] = []

    def check(code: str) -> None:
        found.append(len(check_overlap(code)))

    ran = []
    for each in lengths(case):
        found.clear()
        with (
            config.patch(check_overlap=True, unroll=unroll),
            mock.patch.object(inductor, "check_overlap", check),
        ):
            if case.strategy == "hybrid":
                whole: Attended | None = run_on_grid(each, function)
            else:
                whole = run_case(each, lambda _, q, k, v: function(q, k, v))
        left = torch._C._distributed_c10d._get_work_registry_size()
        ran.append(Ran(whole, tuple(found), left))
    return ran


@pytest.mark.parametrize(
    "values",
    selected_cases(AXES),
    ids=lambda values: "-".join(str(v).replace("torch.", "") for v in values.values()),
)
def test_unrolled_equals_looped(pools, values):
    dynamic = values.pop("dynamic")
    case = AttentionCase(head_dim=HEAD_DIM, **values)
    pool, ranks = pools[case.world], case.world
    unrolled = pool.run(run, case, 8, dynamic, timeout=120)
    looped = pool.run(run, case, 0, dynamic, timeout=120)
    for ran in unrolled:
        assert [x.shifts for x in ran] == [(ranks - 1, 2 * ranks - 1)] * 2
    for ran in looped:
        assert [x.shifts for x in ran] == [(0, 0)] * 2
    assert all(x.works_left == 0 for ran in (*unrolled, *looped) for x in ran)
    # Rank 0 has the whole results.
    for each, first, second in zip(lengths(case), unrolled[0], looped[0], strict=True):
        check_case(each, first.attended)
        check_case(each, second.attended)
        for field in dataclasses.fields(Attended):
            x, y = (getattr(ran.attended, field.name) for ran in (first, second))
            assert torch.equal(x, y), field.name


HYBRIDS = {
    "inner": ("ulysses", "ring"),
    "seq": (48, 37),
    "causal": (True, False),
    "kv_heads": (4, 1),
    "dynamic": (False, True),
}


@pytest.mark.parametrize(
    "values",
    selected_cases(HYBRIDS),
    ids=lambda values: "-".join(map(str, values.values())),
)
def test_the_ring_of_a_hybrid(pools, values):
    """A ring of two ranks; with the ring inside, each has two runs of tokens."""
    dynamic = values.pop("dynamic")
    case = AttentionCase("hybrid", world=4, **values)
    unrolled = pools[4].run(run, case, 2, dynamic, timeout=120)
    looped = pools[4].run(run, case, 0, dynamic, timeout=120)
    for first, second in zip(unrolled, looped, strict=True):
        assert [x.shifts for x in first] == [(1, 3)] * 2
        assert [x.shifts for x in second] == [(0, 0)] * 2
        for each, x, y in zip(lengths(case), first, second, strict=True):
            check_case(each, x.attended)
            for field in dataclasses.fields(Attended):
                one, other = (getattr(z.attended, field.name) for z in (x, y))
                assert torch.equal(one, other), field.name
            assert x.works_left == y.works_left == 0


def run_zigzag(strategy: str, unroll: int) -> tuple[list[tuple], list[int], set[str]]:
    """Programs and errors of four lengths, messages in the code, and layouts."""
    shifts: list[int] = []

    def check(code: str) -> None:
        shifts.append(len(check_overlap(code)))

    with (
        recording() as reports,
        config.patch(check_overlap=True, unroll=unroll),
        mock.patch.object(inductor, "check_overlap", check),
    ):
        options = {"layout": "zigzag", "strategy": strategy}
        lengths = (64, 32, 68, 128)  # 68 are odd numbers of tokens on a rank
        found = run_lengths("attention", "plain", "inductor", True, lengths, **options)
    layouts = {call.plan.layout.value for x in reports for call in x.calls}
    return found, shifts, layouts


@pytest.mark.parametrize(("strategy", "ring"), [("ring", 4), ("hybrid", 2)])
def test_zigzag_of_any_length(pools, strategy, ring):
    """One program: each rank has its halves in it as expressions of the length."""
    for unroll, messages in ((8, [ring - 1, 2 * ring - 1]), (0, [0, 0])):
        answers = pools[4].run(run_zigzag, strategy, unroll, timeout=170)
        check_lengths([found for found, _, _ in answers], [0] * 4)
        assert [shifts for _, shifts, _ in answers] == [messages] * 4
        assert [layouts for _, _, layouts in answers] == [{"zigzag"}] * 4
