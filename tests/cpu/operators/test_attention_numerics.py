"""Attention on sequence-sharded DTensors equals attention in one process.

The references and the tolerances are those of Note [Derived tolerances].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from cpcompile.geometry.head_split import HeadSplit, group_counts
from cpcompile.geometry.layout import Layout
from tests.cpu.attention_cases import (
    TWO_AXES,
    Attended,
    AttentionCase,
    attend_in_one_process,
    call_operator,
    check_case,
    make_inputs,
    run_case,
)
from tests.cpu.on_ranks import on_ranks
from tests.support.attention_calls import attention
from tests.support.bounds import assert_close
from tests.support.pairwise import selected_cases

Changes = dict[str, Any]  # fields of a case
OPERATOR_AND_EAGER: list[Changes] = [
    {"strategy": "ring", "entry": "operator"},
    {"strategy": "all_gather", "entry": "eager"},
]
EXCHANGES: list[Changes] = [
    {"strategy": "ulysses"},
    {"strategy": "hybrid"},
    {"strategy": "hybrid", "inner": "ring"},
]
IN_LAYOUTS: list[Changes] = [
    *({"strategy": "ring", "layout": x} for x in Layout if x is not Layout.CONTIGUOUS),
    {"strategy": "all_gather", "layout": Layout.ZIGZAG},
    {"strategy": "hybrid", "layout": Layout.ZIGZAG},
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
AXES = {
    "strategy": ("ring", "all_gather"),
    "entry": ("operator", "eager", "aot_eager", "inductor"),
    "causal": (True, False),
    "kv_heads": (4, 2, 1),  # of 4 query heads
    "dtype": DTYPES,
    "world": (1, 2, 3, 4),
    # 67 does not divide by 2, 3, 4; with 3 and 2 some ranks hold no token
    "seq": (64, 67, 3, 2),
}
EXCHANGE_AXES = {
    "strategy": ("ulysses", "hybrid"),
    "inner": ("ulysses", "ring"),  # of the hybrid
    "ulysses": (2, 1),
    # Query heads and key heads: those that do and do not divide by the ranks.
    "heads, kv_heads": (
        *((4, 4), (4, 2), (4, 1), (1, 1), (3, 3), (3, 1), (6, 2), (12, 2), (5, 1)),
    ),
    **{name: AXES[name] for name in ("causal", "dtype", "world", "seq")},
}
LAYOUT_AXES = {
    "kind": tuple(range(len(IN_LAYOUTS))),
    "causal": (True, False),
    "kv_heads": (4, 2, 1),
    "dtype": (torch.float32, torch.float64),
    "world": (2, 3, 4),
    # Twice as many ranks divide 48. With 67 the last rank holds fewer tokens, and all
    # an odd number; 9 are barely two for each; with 2 some ranks hold none.
    "seq": (48, 67, 9, 2),
    "value_dim": (None, 5),
}


def exchanged(values: Changes) -> AttentionCase:
    heads, kv_heads = values.pop("heads, kv_heads")
    return AttentionCase(heads=heads, kv_heads=kv_heads, **values)


def laid_out(values: Changes) -> AttentionCase:
    return AttentionCase(**IN_LAYOUTS[values.pop("kind")], **values)


def each(
    kinds: Sequence[Changes], *variants: Changes, **fixed: Any
) -> list[AttentionCase]:
    """A case of every kind and variant."""
    return [AttentionCase(**kind | x | fixed) for x in variants for kind in kinds]


LENGTHS = [(30, 67), (67, 30), (5, 64), (64, 2), (30, 31)]  # of queries and of keys
CROSSED = [
    {"seq": q, "kv_seq": k, "causal": causal}
    for q, k in LENGTHS
    for causal in (True, False)
]
ONE_WHOLE = [
    {"q_placement": q, "kv_placement": kv, "causal": causal}
    for q, kv in ((Replicate(), Shard(2)), (Shard(2), Replicate()))
    for causal in (True, False)
]
HEAD_DIMS = [
    {"head_dim": dim, "dtype": dtype}
    for dim in (7, 80)
    for dtype in (torch.float32, torch.bfloat16)
]
PLACEMENTS = ("q_placement", "kv_placement")
SCALES: list[Changes] = [{"scale": 0.5}, {"scale": 0.01}]
VALUE_DIMS: list[Changes] = [{"value_dim": 5}, {"value_dim": 24}]

# Query heads, key heads, ranks: keys that travel with each group of heads, once for
# several groups, and in copies.
SPLITS = [
    *((8, 8, 2), (8, 4, 2), (8, 2, 2), (8, 1, 2)),
    *((12, 2, 3), (12, 6, 3), (16, 2, 4), (16, 8, 4)),
]
SIZES: list[Changes] = [
    {"seq": 64, "dtype": torch.float64},
    {"seq": 67, "dtype": torch.bfloat16, "causal": False},
    {"seq": 3},
]


def in_groups() -> list[AttentionCase]:
    """Heads that are exchanged a few at a time; and more groups than there can be."""
    few = ((8, 3), (6, 2), (2, 4))
    found = [{"heads": h, "kv_heads": 2, "head_groups": g} for h, g in few]
    for number, (heads, kv_heads, world) in enumerate(SPLITS):
        given = {"heads": heads, "kv_heads": kv_heads, "world": world}
        for size in islice(cycle(SIZES), number % 3, number % 3 + 2):
            for count in group_counts(heads, kv_heads, world):
                found.append(given | size | {"head_groups": count})
    return [AttentionCase("ulysses", **changes) for changes in found]


CASES = {
    "pairs": [AttentionCase(**values) for values in selected_cases(AXES)],
    "exchanges": [*map(exchanged, selected_cases(EXCHANGE_AXES))],
    "layouts": [*map(laid_out, selected_cases(LAYOUT_AXES))],
    "groups of heads": in_groups(),
    "scale": [*each(OPERATOR_AND_EAGER, *SCALES), *each(EXCHANGES, *SCALES, world=4)],
    "head dim": [
        *each(OPERATOR_AND_EAGER, *HEAD_DIMS, world=3),
        *each(EXCHANGES, *HEAD_DIMS, world=4),
    ],
    # Operators only: aten's CPU flash kernel, behind the eager entry, wants one.
    "value dim": each(
        [{"strategy": "ring"}, {"strategy": "all_gather"}, *EXCHANGES],
        *VALUE_DIMS,
        kv_heads=2,
    ),
    "crossed": [
        *each(OPERATOR_AND_EAGER, *CROSSED, world=3),
        *(
            case
            for dtype in (torch.float32, torch.bfloat16)
            for case in each(EXCHANGES, *CROSSED, world=4, dtype=dtype)
        ),
        *each(IN_LAYOUTS, {"causal": False}, seq=30, kv_seq=67, world=4),
    ],
    "placements": [
        *each(OPERATOR_AND_EAGER, *ONE_WHOLE),
        *each(EXCHANGES, *ONE_WHOLE[::2]),
        *each(EXCHANGES, {"q_placement": Shard(1), "kv_placement": Shard(0)}),
        *each(
            IN_LAYOUTS, {"q_placement": Replicate(), "kv_placement": Shard(1)}, seq=37
        ),
    ],
    "eager, not by tokens": [
        *each(
            [{"entry": "eager"}],
            *(
                {"q_placement": x, "kv_placement": x, "kv_heads": heads, "causal": c}
                for x in (Shard(0), Shard(1), Replicate())
                for heads in (4, 2, 1)
                for c in (True, False)
            ),
            *({"batch": n, **dict.fromkeys(PLACEMENTS, Shard(0))} for n in (1, 3)),
        ),
    ],
    # Of 5 tokens the ranks hold 2, 2, 1 and 0; of 4 they hold one each.
    "causal on four": each(
        IN_LAYOUTS,
        *({"seq": seq} for seq in (67, 5, 4)),
        world=4,
        value_dim=5,
        kv_heads=2,
        dtype=torch.float64,
    ),
    "hybrids without a ring or an exchange": each(
        [{"strategy": "hybrid", "layout": Layout.ZIGZAG, "world": 4}],
        *({"ulysses": degree, "seq": seq} for degree in (1, 4) for seq in (64, 61)),
    ),
}
NAMED = [(f"{name}-{case}", case) for name, found in CASES.items() for case in found]


def check_on_ranks(case: AttentionCase, attended: Attended | None) -> None:
    """Compare on rank 0, which has whole tensors."""
    if attended is not None:
        check_case(case, attended)


@pytest.mark.parametrize("case", [x for _, x in NAMED], ids=[name for name, _ in NAMED])
@on_ranks(lambda case: case.world)
def test_forward_and_gradients(case):
    check_on_ranks(case, run_case(case))


ON_TWO_AXES = [
    (case, placements)
    for kv_heads in (4, 1)
    for placements in TWO_AXES
    for case in each(
        [
            {"world": 4},
            {"entry": "eager", "world": 4},
            *(x | {"world": 2} for x in EXCHANGES),
        ],
        {"kv_heads": kv_heads, "seq": 67},
    )
]
# The batch of 2 divides by each axis but not by both together.
ON_TWO_AXES += [
    (AttentionCase(entry="eager", world=4), placements)
    for placements in (
        *((Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Replicate())),
    )
]


@pytest.mark.parametrize(("case", "placements"), ON_TWO_AXES, ids=str)
@on_ranks(4)
def test_two_mesh_axes(case, placements):
    """The operator's group is the axis with the sequence."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("one", "other"))
    q, k, v, grad = (
        distribute_tensor(x, mesh, placements, src_data_rank=None).requires_grad_()
        for x in make_inputs(case)
    )
    if case.entry == "operator":
        out = call_operator(case, mesh, placements.index(Shard(2)), q, k, v)
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=case.causal, enable_gqa=case.kv_heads != case.heads
        )
    grads = torch.autograd.grad(out, (q, k, v), grad.detach())
    check_case(case, Attended(*(x.full_tensor() for x in (out.detach(), *grads))))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "kind", [{"strategy": "ring"}, {"strategy": "all_gather"}, *EXCHANGES], ids=str
)
@on_ranks(4)
def test_rows_without_keys_are_zero(kind, causal):
    got = run_case(AttentionCase(**kind, causal=causal, kv_seq=0, world=4))
    if got is not None:
        assert got.out.shape == (2, 4, 64, 16) and not got.out.any()
        assert not got.dq.any()
        assert got.dk.shape == got.dv.shape == (2, 4, 0, 16)


def test_group_counts():
    assert group_counts(32, 8, 8) == [2, 4]
    assert group_counts(32, 32, 8) == [2, 4]
    assert group_counts(24, 4, 4) == [2, 3, 6]
    assert group_counts(12, 4, 3) == [2, 4]
    assert group_counts(6, 6, 4) == []  # ranks would have other numbers of heads
    assert group_counts(8, 8, 8) == group_counts(0, 0, 2) == []


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), SPLITS)
def test_a_group_reads_whole_heads_of_keys(heads, kv_heads, ranks):
    split = HeadSplit(heads, kv_heads, ranks)
    run = split.per_rank // split.kv_per_rank
    for count in group_counts(heads, kv_heads, ranks):
        own = split.per_rank // count
        for first in range(0, split.per_rank, own):
            read = {head // run for head in range(first, first + own)}
            readers = [h for h in range(split.per_rank) if h // run in read]
            assert own >= run or len(read) == 1
            assert own < run or len(readers) == own


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-13), (torch.bfloat16, 0.04)]
)
@on_ranks(2)
def test_sinks_and_the_log_sum_exp_of_groups_of_heads(dtype, limit):
    """In bfloat16, whose log-sum-exp is float32, each result has its own message."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    whole = [normal(2, 8, 37, 16), normal(2, 4, 37, 16), normal(2, 4, 37, 16)]
    whole_sinks, grads = normal(8), [normal(2, 8, 37, 16), normal(2, 8, 37)]
    found = []
    for head_groups in (1, 2, 4):
        leaves = [
            distribute_tensor(x, mesh, [placement], src_data_rank=None).requires_grad_()
            for x, placement in zip(
                [*whole, whole_sinks], [*[Shard(2)] * 3, Replicate()], strict=True
            )
        ]
        group = mesh.get_group(0).group_name
        given = {"sinks": leaves[3], "wants_lse": True, "head_groups": head_groups}
        results = attention("ulysses")(*leaves[:3], 37, 37, True, 0.25, group, **given)
        given = [
            distribute_tensor(grad.to(x.dtype), mesh, x.placements, src_data_rank=None)
            for grad, x in zip(grads, results, strict=True)
        ]
        all_of = [*results, *torch.autograd.grad(results, leaves, given)]
        found.append([x.full_tensor().detach() for x in all_of])
    for other in found[1:]:
        for x, y in zip(found[0], other, strict=True):
            assert (x - y).abs().max() <= limit


def test_reference_is_the_softmax():
    """The oracle itself, against the formula."""
    case = AttentionCase(seq=9, causal=False, dtype=torch.float64)
    q, k, v, _ = inputs = make_inputs(case)
    got = attend_in_one_process(inputs, False, None, torch.float64)
    expected = (q @ k.mT * 16**-0.5).softmax(-1) @ v
    assert_close("out", got.out, expected)


def test_a_wrong_result_is_noticed():
    case = AttentionCase(dtype=torch.bfloat16)
    inputs = make_inputs(case)
    right = attend_in_one_process(inputs, True, None, torch.bfloat16)
    check_case(case, right)
    wrong = dataclasses.replace(right, dk=right.dk.roll(1, 2))
    with pytest.raises(AssertionError, match=r"dk: error .*, allowed"):
        check_case(case, wrong)
    with pytest.raises(AssertionError, match="error nan"):
        check_case(case, dataclasses.replace(right, out=right.out * float("nan")))
