"""The cp:: operators keep torch's contracts, their own, and their DTensor rule."""

import itertools
import textwrap

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cpcompile.ops.dtensor.dtensor_rules import axis_of_group
from tests.support.attention_calls import attention, rest
from tests.unit.ops.operands import make_operands, zeros_on

STRATEGIES = ["ring", "all_gather"]
LAYOUTS = [
    *(("ring", layout) for layout in ("zigzag", "striped", "fold")),
    ("all_gather", "zigzag"),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_opcheck(one_rank, strategy, causal, kv_heads, dtype):
    q, k, v = (x.requires_grad_() for x in make_operands(dtype, kv_heads))
    given = rest(6, 6, causal, 0.3, one_rank)
    forward = getattr(torch.ops.cp, f"{strategy}_attention").default
    backward = getattr(torch.ops.cp, f"{strategy}_attention_backward").default
    torch.library.opcheck(forward, (q, k, v, *given))
    with torch.no_grad():
        out, lse = forward(q, k, v, *given)
        saved = [x.detach() for x in (torch.ones_like(out), q, k, v, out, lse)]
    torch.library.opcheck(backward, (*saved, *given, False, None))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_opcheck_of_strided_cross_attention(one_rank, strategy):
    q, k, v = make_operands(torch.float32, 2, q_len=3, kv_len=7, dims=(8, 5))
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    forward = getattr(torch.ops.cp, f"{strategy}_attention").default
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(forward, (*leaves, *rest(3, 7, True, 0.3, one_rank)))


@pytest.mark.parametrize(("strategy", "layout"), LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
def test_opcheck_of_layouts(one_rank, strategy, layout, causal):
    q, k, v = (x.requires_grad_() for x in make_operands(torch.float32, 2))
    forward = getattr(torch.ops.cp, f"{strategy}_attention").default
    given = rest(6, 6, causal, 0.3, one_rank, layout=layout)
    torch.library.opcheck(forward, (q, k, v, *given))


SEQUENCE_PLACEMENTS = [Replicate(), Shard(0), Shard(1), Shard(2)]
DP_PLACEMENTS = [Replicate(), Shard(0), Shard(1)]


def attend(mesh, placements, strategy="ring", layout="contiguous"):
    """cp attention of DTensors [4, 4, 8, 6] with these placements."""

    q, k, v = (
        zeros_on(mesh, (4, 4, 8, 6), placements).requires_grad_() for _ in range(3)
    )
    op = attention(strategy)
    group = mesh.get_group("cp").group_name
    return (q, k, v), op(q, k, v, 8, 8, True, 0.3, group, layout=layout)


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


@pytest.mark.parametrize(("strategy", "layout"), LAYOUTS)
def test_the_rule_finds_the_group_of_a_layout(fake_mesh, strategy, layout):
    leaves, (out, _) = attend(fake_mesh, (Shard(0), Shard(2)), strategy, layout)
    assert out.placements == (Shard(0), Shard(2))
    grads = torch.autograd.grad(out, leaves, out.detach())
    assert all(grad.placements == out.placements for grad in grads)


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
    out, _ = attention("ring")(q, kv, kv, 8, 8, True, 0.3, group)
    assert out.shape == (4, 4, 8, 6)
    assert out.placements[1] == Shard(2)
    assert out.placements[0] in (Replicate(), Shard(0))


def test_a_mesh_that_is_made_twice_is_one(fake_mesh):
    """DTensor may answer from its memory of the first one."""
    again = dist.device_mesh.init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("dp", "cp")
    )
    assert again == fake_mesh
    for axis, name in enumerate(("dp", "cp")):
        group = again.get_group(name).group_name
        assert axis_of_group(fake_mesh, group) == axis


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
