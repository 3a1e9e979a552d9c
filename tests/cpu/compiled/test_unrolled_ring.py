"""A ring that Inductor sees as steps equals the ring that runs them in a loop.

Every message is proven to be hidden in the code of every rank, and none is left behind.
References and tolerances are those of Note [Derived tolerances].
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cpcompile.geometry.layout import Layout
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
from tests.cpu.on_ranks import on_ranks
from tests.support.counted_shifts import counted_shifts
from tests.support.pairwise import selected_cases

AXES = {
    "world": (2, 3, 4),
    "seq": (48, 37),  # 37 tokens are uneven chunks of all of these
    "causal": (True, False),
    "kv_heads": (4, 2),
    "dtype": (torch.float32, torch.bfloat16),
    "layout": tuple(Layout),
    "dynamic": (False, True),
}

# No chunk of 48 or 37 tokens is as long: to Dynamo equal sizes are one symbol, and the
# width of heads, which kernels fix, would fix the length, which is then compiled twice.
HEAD_DIM = 8


def attend(case: AttentionCase, dynamic: bool, **options):
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


def run(
    case: AttentionCase, unroll: int, dynamic: bool
) -> tuple[list[Attended | None], list[tuple[int, ...]]]:
    """Forward and gradients at every length, by one compiled function, and shifts.

    Rank 0 has the whole results; of a hybrid every rank has.
    """
    torch._dynamo.reset()
    names = grid(case.inner).mesh_dim_names if case.strategy == "hybrid" else "cp"
    function = attend(case, dynamic, axis=names, layout=case.layout.value)
    results, shifts = [], []
    for each in lengths(case):
        with counted_shifts(unroll) as found:
            if case.strategy == "hybrid":
                whole: Attended | None = run_on_grid(each, function)
            else:
                given = dataclasses.replace(each, layout=Layout.CONTIGUOUS)
                whole = run_case(given, lambda _, q, k, v: function(q, k, v))
        results.append(whole)
        shifts.append(tuple(found))
    return results, shifts


def case_of(values: dict, **fixed) -> tuple[AttentionCase, bool]:
    dynamic = values.pop("dynamic")
    return AttentionCase(**values, **fixed), dynamic


HYBRIDS = {
    "inner": ("ulysses", "ring"),
    "seq": (48, 37),
    "causal": (True, False),
    "kv_heads": (4, 1),
    "layout": (Layout.CONTIGUOUS, Layout.ZIGZAG),
    "dynamic": (False, True),
}
# A hybrid has a ring of two ranks; with the ring inside, two runs of tokens on each.
CASES = [case_of(values, head_dim=HEAD_DIM) for values in selected_cases(AXES)]
CASES += [
    case_of(values, strategy="hybrid", world=4) for values in selected_cases(HYBRIDS)
]


@pytest.mark.parametrize(("case", "dynamic"), CASES, ids=str)
@on_ranks(lambda case: case.world)
def test_unrolled_equals_looped(case, dynamic):
    hybrid = case.strategy == "hybrid"
    ranks = 2 if hybrid else case.world
    unrolled, shifts = run(case, 2 if hybrid else 8, dynamic)
    looped, none = run(case, 0, dynamic)
    assert shifts == [(ranks - 1, 2 * ranks - 1)] * 2
    assert none == [(0, 0)] * 2
    for each, first, second in zip(lengths(case), unrolled, looped, strict=True):
        if first is None or second is None:
            continue
        check_case(each, first)
        check_case(each, second)
        for field in dataclasses.fields(Attended):
            x, y = (getattr(ran, field.name) for ran in (first, second))
            assert torch.equal(x, y), field.name


@pytest.mark.parametrize(("strategy", "ring"), [("ring", 4), ("hybrid", 2)])
@on_ranks(4)
def test_zigzag_of_any_length(strategy, ring):
    """One program: each rank has its halves in it as expressions of the length."""
    for unroll, messages in ((8, [ring - 1, 2 * ring - 1]), (0, [0, 0])):
        with recording() as reports, counted_shifts(unroll) as shifts:
            # 68 are odd numbers of tokens on a rank.
            given = ("attention", "plain", "inductor", True, (64, 32, 68, 128))
            found = run_lengths(*given, layout="zigzag", strategy=strategy)
        check_lengths([found], [0] * 4)
        assert shifts == messages
        layouts = {call.plan.layout.value for x in reports for call in x.calls}
        assert layouts == {"zigzag"}
