"""Attention on sequence-sharded DTensors equals attention in one process.

The references and the tolerances are those of Note [Derived tolerances].
"""

import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.cpu.attention_cases import (
    TWO_AXES,
    Attended,
    AttentionCase,
    attend_in_one_process,
    check_case,
    distributed_inputs,
    make_inputs,
    run_case,
    sequence_mesh,
)
from tests.support.attention_calls import attention
from tests.support.bounds import OPERAND_SCALE, assert_close
from tests.support.pairwise import selected_cases

AXES = {
    "strategy": ("ring", "all_gather"),
    "entry": ("operator", "eager"),
    "causal": (True, False),
    "kv_heads": (4, 2, 1),  # of 4 query heads
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "world": (1, 2, 3, 4),
    # 67 does not divide by 2, 3, 4; with 3 and 2 some ranks hold no token
    "seq": (64, 67, 3, 2),
}
BOTH = [("ring", "operator"), ("all_gather", "eager")]


def run_and_check(pools, case):
    check_case(case, pools[case.world].run(run_case, case)[0])


@pytest.mark.parametrize(
    "case", [AttentionCase(**values) for values in selected_cases(AXES)], ids=str
)
def test_forward_and_gradients(pools, case):
    run_and_check(pools, case)


@pytest.mark.parametrize(("strategy", "entry"), BOTH)
@pytest.mark.parametrize("scale", [0.5, 0.01])
def test_scale(pools, strategy, entry, scale):
    run_and_check(pools, AttentionCase(strategy, entry, scale=scale))


@pytest.mark.parametrize(("strategy", "entry"), BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [7, 80])
def test_head_dim(pools, strategy, entry, dtype, head_dim):
    run_and_check(
        pools,
        AttentionCase(strategy, entry, dtype=dtype, head_dim=head_dim, world=3),
    )


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@pytest.mark.parametrize("value_dim", [5, 24])
def test_values_of_another_dim(pools, strategy, value_dim):
    """Operators only: aten's CPU flash kernel, behind the eager entry, wants one."""
    run_and_check(pools, AttentionCase(strategy, value_dim=value_dim, kv_heads=2))


@pytest.mark.parametrize(("strategy", "entry"), BOTH)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("seq", "kv_seq"), [(30, 67), (67, 30), (5, 64), (64, 2)])
def test_cross_attention(pools, strategy, entry, causal, seq, kv_seq):
    run_and_check(
        pools, AttentionCase(strategy, entry, causal, seq=seq, kv_seq=kv_seq, world=3)
    )


@pytest.mark.parametrize(("strategy", "entry"), BOTH)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("q_placement", "kv_placement"),
    [(Replicate(), Shard(2)), (Shard(2), Replicate())],
    ids=["q whole", "kv whole"],
)
def test_one_side_replicated(pools, strategy, entry, causal, q_placement, kv_placement):
    run_and_check(
        pools,
        AttentionCase(
            strategy,
            entry,
            causal,
            q_placement=q_placement,
            kv_placement=kv_placement,
        ),
    )


@pytest.mark.parametrize("entry", ["operator", "eager"])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("placements", TWO_AXES, ids=str)
def test_two_mesh_axes(pools, entry, kv_heads, placements):
    case = AttentionCase(entry=entry, kv_heads=kv_heads, seq=67, world=4)
    check_case(case, pools[4].run(run_on_two_axes, case, placements)[0])


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Shard(0)),
        (Shard(0), Shard(1)),
        (Shard(1), Replicate()),
    ],
    ids=str,
)
def test_two_mesh_axes_without_sequence_sharding(pools, placements):
    """The batch of 2 divides by each axis but not by both together."""
    case = AttentionCase(entry="eager", world=4)
    check_case(case, pools[4].run(run_on_two_axes, case, placements)[0])


def run_on_two_axes(case, placements):
    """`case` on a mesh (2, 2); the operator's group is the axis with the sequence."""
    mesh = square_mesh()
    q, k, v, grad = (
        distribute_tensor(x, mesh, placements, src_data_rank=None).requires_grad_()
        for x in make_inputs(case)
    )
    if case.entry == "operator":
        op = attention(case.strategy)
        group = mesh.get_group(placements.index(Shard(2))).group_name
        scale = case.head_dim**-0.5
        out = op(q, k, v, case.seq, case.seq, case.causal, scale, group)[0]
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=case.causal, enable_gqa=case.kv_heads != case.heads
        )
    grads = torch.autograd.grad(out, (q, k, v), grad.detach())
    return Attended(*(x.full_tensor() for x in (out.detach(), *grads)))


@functools.cache
def square_mesh():
    return init_device_mesh("cpu", (2, 2))


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@pytest.mark.parametrize("causal", [True, False])
def test_rows_without_keys_are_zero(pools, strategy, causal):
    case = AttentionCase(strategy, causal=causal, kv_seq=0, world=3)
    got = pools[3].run(run_case, case)[0]
    assert got.out.shape == (2, 4, 64, 16) and not got.out.any()
    assert not got.dq.any()
    assert got.dk.shape == got.dv.shape == (2, 4, 0, 16)


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_log_sum_exp(pools, strategy, world):
    case = AttentionCase(strategy, world=world, seq=67, dtype=torch.float64)
    lse = pools[world].run(run_log_sum_exp, case)[0]
    q, k, _, _ = make_inputs(case)
    scores = (q @ k.mT) * case.head_dim**-0.5
    hidden = torch.ones(67, 67, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(hidden, float("-inf")).logsumexp(-1)
    assert_close("lse", lse, expected, floor=OPERAND_SCALE)


def run_log_sum_exp(case):
    q, k, v = distributed_inputs(case)[:3]
    op = attention(case.strategy)
    group = sequence_mesh(case.world).get_group().group_name
    scale = case.head_dim**-0.5
    return op(q, k, v, case.seq, case.seq, case.causal, scale, group)[1].full_tensor()


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
