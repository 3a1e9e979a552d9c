"""Heads that are exchanged a few at a time give what one exchange of all gives."""

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from cpcompile.geometry.head_split import HeadSplit, group_counts
from tests.cpu.attention_cases import AttentionCase, check_case, run_case
from tests.cpu.masked_cases import MaskedCase, check_masked, run_masked
from tests.cpu.masks import MASKS
from tests.support.attention_calls import attention

# Query heads, key heads, ranks: keys that travel with each group, once for several
# groups, and in copies.
SPLITS = [
    (8, 8, 2),
    (8, 4, 2),
    (8, 2, 2),
    (8, 1, 2),
    (12, 2, 3),
    (12, 6, 3),
    (16, 2, 4),
    (16, 8, 4),
]
CASES = [
    AttentionCase(
        "ulysses",
        heads=heads,
        kv_heads=kv_heads,
        world=world,
        head_groups=count,
        seq=seq,
        dtype=dtype,
        causal=causal,
    )
    for number, (heads, kv_heads, world) in enumerate(SPLITS)
    for count in group_counts(heads, kv_heads, world)
    for seq, dtype, causal in itertools.islice(
        itertools.cycle(
            [
                (64, torch.float64, True),
                (67, torch.bfloat16, False),
                (3, torch.float32, True),
            ]
        ),
        number % 3,
        number % 3 + 2,
    )
]


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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_gradients(pools, case):
    check_case(case, pools[case.world].run(run_case, case)[0])


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(pools, mask, kv_heads):
    case = MaskedCase(mask, "ulysses", seq=67, kv_heads=kv_heads, head_groups=2)
    check_masked(case, pools[2].run(run_masked, case)[0])


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_dropout_and_softcap(pools, kv_heads):
    case = MaskedCase(
        "none",
        "ulysses",
        kv_heads=kv_heads,
        head_groups=2,
        dropout_p=0.3,
        softcap=4.0,
    )
    check_masked(case, pools[2].run(run_masked, case)[0])


def run_with_sinks(rank_count, dtype):
    """Return the largest differences to one exchange, of results and gradients."""
    mesh = init_device_mesh("cpu", (rank_count,))
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    whole = [normal(2, 8, 37, 16), normal(2, 4, 37, 16), normal(2, 4, 37, 16)]
    whole_sinks, grads = normal(8), [normal(2, 8, 37, 16), normal(2, 8, 37)]
    found = []
    for head_groups in (1, 2, 4):
        leaves = [
            distribute_tensor(x, mesh, [Shard(2)], src_data_rank=None).requires_grad_()
            for x in whole
        ]
        sinks = distribute_tensor(whole_sinks, mesh, [Replicate()], src_data_rank=None)
        leaves.append(sinks.requires_grad_())
        group = mesh.get_group(0).group_name
        results = attention("ulysses")(
            *leaves[:3],
            *(37, 37, True, 0.25, group),
            sinks=leaves[3],
            wants_lse=True,
            head_groups=head_groups,
        )
        given = [
            distribute_tensor(grad.to(x.dtype), mesh, x.placements, src_data_rank=None)
            for grad, x in zip(grads, results, strict=True)
        ]
        all_of = [*results, *torch.autograd.grad(results, leaves, given)]
        found.append([x.full_tensor().detach() for x in all_of])
    return [
        max(float((x - y).abs().max()) for x, y in zip(found[0], other, strict=True))
        for other in found[1:]
    ]


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-13), (torch.bfloat16, 0.04)]
)
def test_sinks_and_the_log_sum_exp(pools, dtype, limit):
    """In bfloat16, whose log-sum-exp is float32, each result has its own message."""
    for differences in pools[2].run(run_with_sinks, 2, dtype):
        assert max(differences) <= limit


@pytest.mark.parametrize(("heads", "count"), [(8, 3), (6, 2), (2, 4)])
def test_as_many_groups_as_there_can_be(pools, heads, count):
    """Two for three; and one exchange where there are none."""
    case = AttentionCase("ulysses", heads=heads, kv_heads=2, head_groups=count)
    check_case(case, pools[2].run(run_case, case)[0])
