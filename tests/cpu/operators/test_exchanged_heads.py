"""Ulysses and hybrid attention equal attention in one process.

The references and the tolerances are those of Note [Derived tolerances]. Head numbers
are those that do and do not divide by the ranks, and fewer heads than ranks.
"""

import dataclasses
import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.cpu.attention_cases import (
    TWO_AXES,
    Attended,
    AttentionCase,
    call_operator,
    check_case,
    make_inputs,
    run_case,
)
from tests.support.pairwise import selected_cases

HEADS = ((4, 4), (4, 2), (4, 1), (1, 1), (3, 3), (3, 1), (6, 2), (12, 2), (5, 1))
AXES = {
    "strategy": ("ulysses", "hybrid"),
    "inner": ("ulysses", "ring"),  # of the hybrid
    "ulysses": (2, 1),
    "heads": HEADS,  # query heads and key heads
    "causal": (True, False),
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "world": (1, 2, 3, 4),
    # 67 does not divide by 2, 3, 4; with 3 and 2 some ranks hold no token
    "seq": (64, 67, 3, 2),
}
KINDS = [("ulysses", "ulysses"), ("hybrid", "ulysses"), ("hybrid", "ring")]


def make_case(values):
    heads, kv_heads = values.pop("heads")
    return AttentionCase(heads=heads, kv_heads=kv_heads, **values)


def run_and_check(pools, case):
    check_case(case, pools[case.world].run(run_case, case)[0])


@pytest.mark.parametrize("case", map(make_case, selected_cases(AXES)), ids=str)
def test_forward_and_gradients(pools, case):
    run_and_check(pools, case)


@pytest.mark.parametrize(("strategy", "inner"), KINDS)
@pytest.mark.parametrize("scale", [0.5, 0.01])
def test_scale(pools, strategy, inner, scale):
    run_and_check(pools, AttentionCase(strategy, inner=inner, scale=scale, world=4))


@pytest.mark.parametrize(("strategy", "inner"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [7, 80])
def test_head_dim(pools, strategy, inner, dtype, head_dim):
    case = AttentionCase(strategy, inner=inner, dtype=dtype, head_dim=head_dim, world=4)
    run_and_check(pools, case)


@pytest.mark.parametrize(("strategy", "inner"), KINDS)
@pytest.mark.parametrize("value_dim", [5, 24])
def test_values_of_another_dim(pools, strategy, inner, value_dim):
    case = AttentionCase(strategy, inner=inner, value_dim=value_dim, kv_heads=2)
    run_and_check(pools, case)


@pytest.mark.parametrize(("strategy", "inner"), KINDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("seq", "kv_seq"), [(30, 67), (67, 30), (5, 64), (64, 2), (30, 31)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_attention(pools, strategy, inner, causal, seq, kv_seq, dtype):
    case = AttentionCase(strategy, inner=inner, causal=causal, seq=seq, kv_seq=kv_seq)
    run_and_check(pools, dataclasses.replace(case, dtype=dtype, world=4))


@pytest.mark.parametrize(("strategy", "inner"), KINDS)
@pytest.mark.parametrize(
    ("q_placement", "kv_placement"),
    [(Replicate(), Shard(2)), (Shard(2), Replicate()), (Shard(1), Shard(0))],
    ids=["q whole", "kv whole", "heads and batch"],
)
def test_other_placements(pools, strategy, inner, q_placement, kv_placement):
    placements = {"q_placement": q_placement, "kv_placement": kv_placement}
    run_and_check(pools, AttentionCase(strategy, inner=inner, world=2, **placements))


@pytest.mark.parametrize(("strategy", "inner"), KINDS)
@pytest.mark.parametrize("causal", [True, False])
def test_rows_without_keys_are_zero(pools, strategy, inner, causal):
    case = AttentionCase(strategy, inner=inner, causal=causal, kv_seq=0, world=4)
    got = pools[4].run(run_case, case)[0]
    assert got.out.shape == (2, 4, 64, 16) and not got.out.any()
    assert not got.dq.any()
    assert got.dk.shape == got.dv.shape == (2, 4, 0, 16)


@pytest.mark.parametrize(("strategy", "inner"), KINDS)
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("placements", TWO_AXES, ids=str)
def test_two_mesh_axes(pools, strategy, inner, kv_heads, placements):
    case = AttentionCase(strategy, inner=inner, kv_heads=kv_heads, seq=67, world=2)
    check_case(case, pools[4].run(run_on_two_axes, case, placements)[0])


def run_on_two_axes(case, placements):
    """`case` on a mesh (2, 2); the operator's group is the axis with the sequence."""
    mesh = square_mesh()
    q, k, v, grad = (
        distribute_tensor(x, mesh, placements, src_data_rank=None).requires_grad_()
        for x in make_inputs(case)
    )
    out = call_operator(case, mesh, placements.index(Shard(2)), q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), grad.detach())
    return Attended(*(x.full_tensor() for x in (out.detach(), *grads)))


@functools.cache
def square_mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("one", "other"))


def run_without_gradients(case):
    with torch.inference_mode():
        mesh = init_device_mesh("cpu", (case.world,))
        inputs = make_inputs(case)[:3]
        q, k, v = (
            distribute_tensor(x, mesh, [Shard(2)], src_data_rank=None) for x in inputs
        )
        return call_operator(case, mesh, 0, q, k, v).full_tensor().clone()


@pytest.mark.parametrize(("strategy", "inner"), KINDS)
def test_without_gradients_on_a_mesh_without_names(pools, strategy, inner):
    case = AttentionCase(strategy, inner=inner, world=4, seq=67)
    plain = pools[4].run(run_case, case)[0]
    for out in pools[4].run(run_without_gradients, case):
        assert torch.equal(out, plain.out)
