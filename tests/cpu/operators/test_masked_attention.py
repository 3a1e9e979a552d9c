"""Attention under a mask on several ranks equals attention in one process."""

import dataclasses

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from cpcompile.geometry.layout import Layout
from cpcompile.ops.attention_spec import MASK_FIELDS
from cpcompile.ops.dtensor.mask_placements import mask_placements
from tests.cpu.masked_cases import MaskedCase, check_masked, expected, run_masked
from tests.cpu.masks import BATCH, HEADS, MASKS, WITHOUT_BIAS
from tests.support import bounds
from tests.support.masked_calls import under_mask
from tests.support.pairwise import selected_cases

STRATEGIES = ("ring", "all_gather", "ulysses", "hybrid")
AXES = {
    "mask": tuple(MASKS),
    "strategy": STRATEGIES,
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "world": (1, 2, 3, 4),
    "seq": (64, 67, 3, 2),  # of 3 and 2 some ranks hold none
    "kv_heads": (4, 2, 1),
    "known": (False, True),
    "inner": ("ulysses", "ring"),
}
LAYOUT_AXES = {
    "mask": tuple(WITHOUT_BIAS),
    "strategy": ("ring", "all_gather", "hybrid"),
    "world": (1, 2, 3, 4),
    "seq": (64, 67, 3, 2),
    "layout": (Layout.ZIGZAG,),
    "known": (False, True),
}


def run_and_check(pools, case):
    check_masked(case, pools[case.world].run(run_masked, case)[0])


@pytest.mark.parametrize(
    "case", [MaskedCase(**values) for values in selected_cases(AXES)], ids=str
)
def test_forward_and_gradients(pools, case):
    run_and_check(pools, case)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_heads_that_share_keys_round_once(pools, world):
    """Here one rounding of each head's dv, in place of one of their sum, is seen."""
    options = {"world": world, "dtype": torch.bfloat16, "seq": 67, "kv_heads": 1}
    run_and_check(pools, MaskedCase("prefix", "all_gather", **options))


@pytest.mark.parametrize(
    "case", [MaskedCase(**values) for values in selected_cases(LAYOUT_AXES)], ids=str
)
def test_zigzag(pools, case):
    run_and_check(pools, case)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mask", ["window", "left padding", "holes", "bias of batch"])
@pytest.mark.parametrize(("seq", "kv_seq"), [(30, 67), (67, 30), (5, 64), (64, 2)])
def test_cross_attention(pools, strategy, mask, seq, kv_seq):
    case = MaskedCase(mask, strategy, world=3, seq=seq, kv_seq=kv_seq)
    run_and_check(pools, case)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mask", ["window", "bias", "bool of heads"])
@pytest.mark.parametrize("value_dim", [5, 24])
def test_values_of_another_dim(pools, strategy, mask, value_dim):
    run_and_check(pools, MaskedCase(mask, strategy, value_dim=value_dim, kv_heads=2))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mask", ["bias", "bias of batch", "lowest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_without_a_gradient(pools, strategy, mask, dtype):
    case = MaskedCase(mask, strategy, dtype, world=3, seq=67, bias_grad=False)
    run_and_check(pools, case)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_keys_at_all(pools, strategy):
    case = MaskedCase("left padding", strategy, world=3, kv_seq=0)
    out, dq, dk, dv = pools[3].run(run_masked, case)[0]
    assert out.shape == (BATCH, HEADS, 64, 16) and not out.any()
    assert not dq.any()
    assert dk.shape == dv.shape == (BATCH, HEADS, 0, 16)


EIGHT = ["window", "both sides", "causal documents", "bias of batch"]


def test_eight_ranks(pools):
    """More hops, and heads that are fewer than ranks."""
    for mask in EIGHT:
        for strategy in STRATEGIES:
            run_and_check(pools, MaskedCase(mask, strategy, world=8, seq=83))


def run_log_sum_exp(case):
    mesh = init_device_mesh("cpu", (case.world,))
    q, k, v, _ = (
        distribute_tensor(x, mesh, [Shard(2)], src_data_rank=None)
        for x in case.operands()
    )
    key_ranges = distribute_tensor(
        case.fields().key_ranges, mesh, [Replicate()], src_data_rank=None
    )
    op = under_mask(case.strategy)
    group = mesh.get_group(0).group_name
    _, lse = op(q, k, v, None, key_ranges, None, None, case.seq, case.seq, 0.25, group)
    return lse.full_tensor()


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@pytest.mark.parametrize("mask", ["window", "nothing"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_log_sum_exp(pools, strategy, mask, dtype):
    case = MaskedCase(mask, strategy, dtype, world=3, seq=67)
    q, k, _, _ = (x.double() for x in case.operands())
    hidden = ~case.fields().visible(67, 67)
    exact, rough = (
        (x @ y.mT * 0.25).masked_fill(hidden, -torch.inf).logsumexp(-1)
        for x, y in ((q, k), (q.to(dtype), k.to(dtype)))
    )
    got = pools[3].run(run_log_sum_exp, case)[0]
    bounds.assert_close("lse", got, exact, rough, bounds.OPERAND_SCALE)


OTHER_AXIS = [(Shard(0), Shard(2)), (Shard(1), Shard(2)), (Shard(2), Shard(0))]


def run_on_two_axes(case, placements):
    """`case` on a mesh (2, 2); the operator's group is the axis with the sequence."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("one", "other"))
    *qkv, grad = (
        distribute_tensor(x, mesh, placements, src_data_rank=None).requires_grad_()
        for x in case.operands()
    )
    fields = case.fields()
    masks = [
        None
        if x is None
        else distribute_tensor(
            x, mesh, mask_placements(name, placements, x.shape), src_data_rank=None
        )
        for name in MASK_FIELDS
        for x in (getattr(fields, name),)
    ]
    leaves = [*qkv]
    if masks[0] is not None and masks[0].is_floating_point():
        leaves.append(masks[0].requires_grad_())
    op = under_mask(case.strategy)
    groups = case.groups(mesh, placements.index(Shard(2)))
    out, _ = op(*qkv, *masks, case.seq, case.seq, 0.25, *groups)
    grads = torch.autograd.grad(out, leaves, grad.detach())
    return [x.full_tensor() for x in (out.detach(), *grads)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("placements", OTHER_AXIS, ids=str)
@pytest.mark.parametrize(
    "mask",
    [
        *("prefix", "padded documents", "bias", "bias of batch", "bool of heads"),
        *("by key", "by distance", "distance of batch"),
    ],
)
def test_two_mesh_axes(pools, strategy, placements, mask):
    """A bias that both halves of the batch read has a gradient from both."""
    case = MaskedCase(mask, strategy, world=2, seq=67)
    check_masked(case, pools[4].run(run_on_two_axes, case, placements)[0])


def test_a_wrong_result_is_noticed():
    case = MaskedCase("bias of batch", dtype=torch.bfloat16)
    right = expected(case, torch.bfloat16)
    check_masked(case, right)
    for at, name in enumerate(("out", "dq", "dk", "dv", "dbias")):
        wrong = [x.roll(1, 2) if i == at else x for i, x in enumerate(right)]
        with pytest.raises(AssertionError, match=f"{name}: error .*, allowed"):
            check_masked(case, wrong)
    wider = dataclasses.replace(case, mask="bias")
    with pytest.raises(AssertionError):
        check_masked(wider, right)
