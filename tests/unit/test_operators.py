"""The cp:: operators keep torch's contracts, their own, and their DTensor rule."""

import itertools
import textwrap
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile.layout import Chunks
from cpcompile.ops.contract import check_operands
from cpcompile.ops.dtensor_rules import axis_of_group
from tests.unit.operands import make_operands

STRATEGIES = ["ring", "all_gather"]


@pytest.fixture
def fake_mesh() -> Iterator[dist.DeviceMesh]:
    """Rank 1 of a mesh (dp=2, cp=2) that exchanges nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    dist.destroy_process_group()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_opcheck(one_rank, strategy, causal, kv_heads, dtype):
    q, k, v = (x.requires_grad_() for x in make_operands(dtype, kv_heads))
    rest = (6, 6, causal, 0.3, one_rank)
    forward = getattr(torch.ops.cp, f"{strategy}_attention").default
    backward = getattr(torch.ops.cp, f"{strategy}_attention_backward").default
    torch.library.opcheck(forward, (q, k, v, *rest))
    with torch.no_grad():
        out, lse = forward(q, k, v, *rest)
        saved = [x.detach() for x in (torch.ones_like(out), q, k, v, out, lse)]
    torch.library.opcheck(backward, (*saved, *rest))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_opcheck_of_strided_cross_attention(one_rank, strategy):
    q, k, v = make_operands(torch.float32, 2, q_len=3, kv_len=7, dims=(8, 5))
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    forward = getattr(torch.ops.cp, f"{strategy}_attention").default
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(forward, (*leaves, 3, 7, True, 0.3, one_rank))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_log_sum_exp_has_no_gradient(one_rank, strategy):
    q, k, v = (x.requires_grad_() for x in make_operands(torch.float32, 4))
    op = getattr(torch.ops.cp, f"{strategy}_attention")
    out, lse = op(q, k, v, 6, 6, True, 0.3, one_rank)
    assert out.requires_grad
    assert not lse.requires_grad


def message(q, k, v, dtypes=(torch.float32,) * 3, q_len=8, kv_len=8, rank=1):
    """What check_operands says to operands of these shapes on rank `rank` of 2."""
    operands = (torch.empty(s, dtype=d) for s, d in zip((q, k, v), dtypes, strict=True))
    with pytest.raises(ValueError) as caught:
        check_operands(
            "cp::ring_attention", *operands, Chunks(q_len, 2), Chunks(kv_len, 2), rank
        )
    return textwrap.fill(str(caught.value), 80)


RIGHT = (2, 4, 4, 8)


def test_right_operands_pass():
    q, k, v = torch.empty(2, 4, 4, 8), torch.empty(2, 2, 3, 8), torch.empty(2, 2, 3, 5)
    check_operands("cp::ring_attention", q, k, v, Chunks(8, 2), Chunks(7, 2), 1)


def test_three_dimensions():
    assert_expected_inline(
        message((4, 4, 8), (4, 4, 8), (4, 4, 8)),
        """\
cp::ring_attention: got q (4, 4, 8), k (4, 4, 8), v (4, 4, 8) of sequences of 8
queries and 8 keys on 2 ranks: q, k and v need four dimensions [batch, heads,
tokens, dim]. Pass contiguous chunks as torch.chunk makes them, or DTensors
sharded on the sequence.""",
    )


def test_heads_that_do_not_divide():
    assert_expected_inline(
        message(RIGHT, (2, 3, 4, 8), (2, 3, 4, 8)),
        """\
cp::ring_attention: got q (2, 4, 4, 8), k (2, 3, 4, 8), v (2, 3, 4, 8) of
sequences of 8 queries and 8 keys on 2 ranks: the query heads need to be a
multiple of the key heads. Pass contiguous chunks as torch.chunk makes them, or
DTensors sharded on the sequence.""",
    )


def test_no_key_heads():
    assert_expected_inline(
        message(RIGHT, (2, 0, 4, 8), (2, 0, 4, 8)),
        """\
cp::ring_attention: got q (2, 4, 4, 8), k (2, 0, 4, 8), v (2, 0, 4, 8) of
sequences of 8 queries and 8 keys on 2 ranks: the query heads need to be a
multiple of the key heads. Pass contiguous chunks as torch.chunk makes them, or
DTensors sharded on the sequence.""",
    )


def test_wrong_number_of_queries():
    assert_expected_inline(
        message(RIGHT, RIGHT, RIGHT, q_len=7),
        """\
cp::ring_attention: got q (2, 4, 4, 8), k (2, 4, 4, 8), v (2, 4, 4, 8) of
sequences of 7 queries and 8 keys on 2 ranks: rank 1 needs 3 queries. Pass
contiguous chunks as torch.chunk makes them, or DTensors sharded on the
sequence.""",
    )


def test_wrong_number_of_keys():
    assert_expected_inline(
        message(RIGHT, RIGHT, RIGHT, kv_len=9, rank=0),
        """\
cp::ring_attention: got q (2, 4, 4, 8), k (2, 4, 4, 8), v (2, 4, 4, 8) of
sequences of 8 queries and 9 keys on 2 ranks: rank 0 needs 5 keys. Pass
contiguous chunks as torch.chunk makes them, or DTensors sharded on the
sequence.""",
    )


def test_head_dims_that_differ():
    assert_expected_inline(
        message(RIGHT, (2, 4, 4, 16), (2, 4, 4, 16)),
        """\
cp::ring_attention: got q (2, 4, 4, 8), k (2, 4, 4, 16), v (2, 4, 4, 16) of
sequences of 8 queries and 8 keys on 2 ranks: k needs the head dim of q, and v
the other dims of k. Pass contiguous chunks as torch.chunk makes them, or
DTensors sharded on the sequence.""",
    )


def test_keys_and_values_that_differ():
    assert_expected_inline(
        message(RIGHT, RIGHT, (2, 4, 3, 8)),
        """\
cp::ring_attention: got q (2, 4, 4, 8), k (2, 4, 4, 8), v (2, 4, 3, 8) of
sequences of 8 queries and 8 keys on 2 ranks: k needs the head dim of q, and v
the other dims of k. Pass contiguous chunks as torch.chunk makes them, or
DTensors sharded on the sequence.""",
    )


def test_batches_that_differ():
    text = message(RIGHT, (3, 4, 4, 8), (3, 4, 4, 8))
    assert "q (2, 4, 4, 8), k (3, 4, 4, 8)" in text
    assert "batch" in text


def test_dtypes_that_differ():
    dtypes = (torch.float32, torch.bfloat16, torch.bfloat16)
    assert_expected_inline(
        message(RIGHT, RIGHT, RIGHT, dtypes),
        """\
cp::ring_attention: got q (2, 4, 4, 8), k (2, 4, 4, 8), v (2, 4, 4, 8) of
sequences of 8 queries and 8 keys on 2 ranks: one dtype is needed, got
torch.float32, torch.bfloat16, torch.bfloat16. Pass contiguous chunks as
torch.chunk makes them, or DTensors sharded on the sequence.""",
    )


@pytest.mark.parametrize("name", [f"{s}_attention" for s in STRATEGIES])
def test_the_operators_check(one_rank, name):
    q, k, v = make_operands(torch.float32, 4)
    with pytest.raises(ValueError, match=f"cp::{name}: .* rank 0 needs 7 queries"):
        getattr(torch.ops.cp, name)(q, k, v, 7, 6, True, 0.3, one_rank)


SEQUENCE_PLACEMENTS = [Replicate(), Shard(0), Shard(1), Shard(2)]
DP_PLACEMENTS = [Replicate(), Shard(0), Shard(1)]


def attend(mesh, placements, strategy="ring", kv_heads=4, batch=4):
    """cp attention of DTensors [batch, 4 or kv_heads, 8, 6] with these placements."""

    def make(heads):
        whole = torch.empty(batch, heads, 8, 6, device="meta")
        return DTensor.from_local(
            torch.zeros(local_shape(whole.shape, mesh, placements)),
            mesh,
            placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        ).requires_grad_()

    q, k, v = make(4), make(kv_heads), make(kv_heads)
    op = getattr(torch.ops.cp, f"{strategy}_attention")
    group = mesh.get_group("cp").group_name
    return (q, k, v), op(q, k, v, 8, 8, True, 0.3, group)


def local_shape(shape, mesh, placements):
    shape = list(shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            shape[placement.dim] //= mesh.size(axis)
    return shape


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "placements", list(itertools.product(DP_PLACEMENTS, SEQUENCE_PLACEMENTS)), ids=str
)
def test_the_rule_shards_the_sequence_on_cp_only(fake_mesh, strategy, placements):
    leaves, (out, lse) = attend(fake_mesh, placements, strategy)
    expected = (placements[0], Shard(2))
    assert out.placements == expected
    assert lse.placements == expected
    assert out.shape == (4, 4, 8, 6)
    assert lse.shape == (4, 4, 8)
    grads = torch.autograd.grad(out, leaves, out.detach())
    assert all(grad.placements == expected for grad in grads)
    assert [grad.shape for grad in grads] == [leaf.shape for leaf in leaves]


def test_partial_results_are_summed_before(fake_mesh):
    _, (out, _) = attend(fake_mesh, (Replicate(), Partial()))
    assert out.placements[1] == Shard(2)
    assert out.placements[0] in (Replicate(), Shard(0))  # either costs the same


def test_heads_that_do_not_divide_are_not_sharded(fake_mesh):
    """One key head cannot be split on dp=2; the sequence still is, on cp."""
    mesh = fake_mesh
    q = DTensor.from_local(torch.zeros(4, 2, 4, 6), mesh, [Shard(1), Shard(2)])
    kv = DTensor.from_local(torch.zeros(4, 1, 4, 6), mesh, [Replicate(), Shard(2)])
    group = mesh.get_group("cp").group_name
    out, _ = torch.ops.cp.ring_attention(q, kv, kv, 8, 8, True, 0.3, group)
    assert out.shape == (4, 4, 8, 6)
    assert out.placements[1] == Shard(2)
    assert out.placements[0] in (Replicate(), Shard(0))


def test_a_group_that_is_no_axis_of_the_mesh(fake_mesh):
    with pytest.raises(ValueError) as caught:
        axis_of_group(fake_mesh, "nowhere")
    text = str(caught.value).replace(str(fake_mesh), "MESH")
    assert_expected_inline(
        textwrap.fill(text, 80),
        """\
cp attention over group 'nowhere': no axis of MESH has that group; pass the name
of a group of the mesh that the tensors are sharded on""",
    )
