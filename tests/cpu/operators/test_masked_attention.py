"""Attention under a mask on several ranks equals attention in one process."""

import dataclasses
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from cpcompile.geometry.layout import Layout
from cpcompile.ops.attention_spec import MASK_FIELDS
from cpcompile.ops.dtensor.mask_placements import mask_placements
from cpcompile.ops.strategies import ring_steps
from tests.cpu.masked_cases import MaskedCase, check_masked, expected, run_masked
from tests.cpu.masks import MASKS, WITHOUT_BIAS
from tests.cpu.on_ranks import on_ranks
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


def checked(case: MaskedCase, backend: str | None = None) -> None:
    """Compare on rank 0, which has whole tensors."""
    if (got := run_masked(case, backend)) is not None:
        check_masked(case, got)


def each(masks, strategies=STRATEGIES, *variants, **fixed) -> list[MaskedCase]:
    """A case of every mask, strategy and variant."""
    return [
        MaskedCase(mask, strategy, **variant | fixed)
        for variant in variants or ({},)
        for mask in masks
        for strategy in strategies
    ]


LENGTHS = [(30, 67), (67, 30), (5, 64), (64, 2)]  # of queries and of keys
CASES = {
    "pairs": [MaskedCase(**values) for values in selected_cases(AXES)],
    "zigzag": [MaskedCase(**values) for values in selected_cases(LAYOUT_AXES)],
    # One rounding of each head's dv, in place of one of their sum, is seen here.
    "heads that share keys": each(
        ["prefix"],
        ["all_gather"],
        *({"world": world} for world in (1, 2, 3, 4)),
        dtype=torch.bfloat16,
        seq=67,
        kv_heads=1,
    ),
    "crossed": each(
        ["window", "left padding", "holes", "bias of batch"],
        STRATEGIES,
        *({"seq": q, "kv_seq": k} for q, k in LENGTHS),
        world=3,
    ),
    "value dim": each(
        ["window", "bias", "bool of heads"],
        STRATEGIES,
        *({"value_dim": dim} for dim in (5, 24)),
        kv_heads=2,
    ),
    "a bias without a gradient": each(
        ["bias", "bias of batch", "lowest"],
        STRATEGIES,
        *({"dtype": dtype} for dtype in (torch.float32, torch.bfloat16)),
        world=3,
        seq=67,
        bias_grad=False,
    ),
    "heads in groups": [
        *each(
            MASKS,
            ["ulysses"],
            *({"kv_heads": heads} for heads in (4, 2, 1)),
            seq=67,
            head_groups=2,
        ),
        *each(
            ["none"],
            ["ulysses"],
            *({"kv_heads": heads} for heads in (4, 1)),
            head_groups=2,
            dropout_p=0.3,
            softcap=4.0,
        ),
    ],
    # More hops, and heads that are fewer than ranks.
    "eight ranks": each(
        ["window", "both sides", "causal documents", "bias of batch"],
        world=8,
        seq=83,
    ),
}
NAMED = {f"{name}-{case}": case for name, found in CASES.items() for case in found}


@pytest.mark.parametrize("case", NAMED.values(), ids=NAMED)
@on_ranks(lambda case: case.world)
def test_forward_and_gradients(case):
    checked(case)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mask", ["padded documents", "bias", "bool of heads"])
@on_ranks(2)
def test_compiled(strategy, mask):
    """AOTAutograd traces through the DTensors, forward and backward."""
    checked(MaskedCase(mask, strategy, world=2, seq=67), "aot_eager")


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@pytest.mark.parametrize("mask", ["window", "nothing"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@on_ranks(3)
def test_the_log_sum_exp(strategy, mask, dtype):
    case = MaskedCase(mask, strategy, dtype, world=3, seq=67)
    mesh = init_device_mesh("cpu", (3,))
    q, k, v, _ = (
        distribute_tensor(x, mesh, [Shard(2)], src_data_rank=None)
        for x in case.operands()
    )
    key_ranges = distribute_tensor(
        case.fields().key_ranges, mesh, [Replicate()], src_data_rank=None
    )
    masks = (None, key_ranges, None, None)
    rest = (case.seq, case.seq, 0.25, mesh.get_group(0).group_name)
    got = under_mask(strategy)(q, k, v, *masks, *rest)[1].full_tensor()
    q, k, _, _ = (x.double() for x in case.operands())
    hidden = ~case.fields().visible(67, 67)
    exact, rough = (
        (x @ y.mT * 0.25).masked_fill(hidden, -torch.inf).logsumexp(-1)
        for x, y in ((q, k), (q.to(dtype), k.to(dtype)))
    )
    bounds.assert_close("lse", got, exact, rough, bounds.OPERAND_SCALE)


OTHER_AXIS = [(Shard(0), Shard(2)), (Shard(1), Shard(2)), (Shard(2), Shard(0))]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("placements", OTHER_AXIS, ids=str)
@pytest.mark.parametrize(
    "mask",
    [
        *("prefix", "padded documents", "bias", "bias of batch", "bool of heads"),
        *("by key", "by distance", "distance of batch"),
    ],
)
@on_ranks(4)
def test_two_mesh_axes(strategy, placements, mask):
    """A bias that both halves of the batch read has a gradient from both."""
    case = MaskedCase(mask, strategy, world=2, seq=67)
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
    check_masked(case, [x.full_tensor() for x in (out.detach(), *grads)])


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


KEYS, SUMS = "keys and values", "dk and dv"


# How far chunks go in each direction, and their sums home. Chunks of attention that are
# the chunks of the ranks, and no key at all, send nothing.
JUMPS = {
    **{MaskedCase("window", world=4, known=x): ([1], 3) for x in (False, True)},
    MaskedCase("both sides", world=4): ([1, 2], 1),
    MaskedCase("causal", world=4): ([1, 1, 1], 1),
    MaskedCase("causal", world=4, layout=Layout.ZIGZAG): ([1, 1, 1], 1),
    MaskedCase("bias of batch", world=4, seq=67): ([1, 1, 1], 1),
    **{
        MaskedCase(mask, world=4, seq=seq, known=x): ([], 0)
        for mask, seq in (("chunked", 48), ("nothing", 64))
        for x in (False, True)
    },
}


@pytest.mark.parametrize("case", JUMPS, ids=str)
@on_ranks(4)
def test_chunks_go_no_farther_than_somebody_sees_them(case):
    sent = {}

    def counting(tensors, group, where, after=None, distance=1):
        what, direction = where.split(" of the ")
        key = f"{direction.split()[0]}: {what}"
        sent.setdefault(key, []).append(distance)
        return shift(tensors, group, where, after, distance)

    shift = ring_steps.ring_shift
    with mock.patch.object(ring_steps, "ring_shift", counting):
        got = run_masked(case)
    if got is not None:
        check_masked(case, got)
    keys, home = JUMPS[case]
    wanted = {f"forward: {KEYS}": keys, f"backward: {KEYS}": keys}
    wanted[f"backward: {SUMS}"] = [*keys, home]
    assert sent == (wanted if keys else {})
