"""The cp:: operators keep torch's contracts, their own, and their DTensor rule."""

import itertools
import textwrap

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch.distributed.tensor import Partial, Replicate, Shard

from cpcompile.geometry.degrees import CPDegrees
from cpcompile.ops.dtensor.dtensor_rules import axis_of_group
from cpcompile.ranks.mesh_factors import hybrid_groups
from tests.support.attention_calls import attention, groups_of, rest
from tests.support.pairwise import in_pairs
from tests.unit.ops.operands import make_operands, zeros_on

OWN_BACKWARD = ["ring", "all_gather"]
STRATEGIES = [*OWN_BACKWARD, "ulysses", "hybrid"]
LAYOUTS = [
    *(("ring", layout) for layout in ("zigzag", "striped", "fold")),
    *(("all_gather", "zigzag"), ("hybrid", "zigzag")),
]


def check(strategy, one_rank, leaves, *sizes, ulysses_inner=True, **given):
    """opcheck of an operator, and of the backward that it has of its own."""
    groups = groups_of(strategy, one_rank, ulysses_inner)
    rest_of_it = rest(*sizes, 0.3, *groups, **given)
    forward = getattr(torch.ops.cp, f"{strategy}_attention").default
    leaves = [x.detach().requires_grad_() for x in leaves]
    torch.library.opcheck(forward, (*leaves, *rest_of_it))
    if strategy in OWN_BACKWARD:
        backward = getattr(torch.ops.cp, f"{strategy}_attention_backward").default
        with torch.no_grad():
            out, lse = forward(*leaves, *rest_of_it)
        saved = [x.detach() for x in (torch.ones_like(out), *leaves, out, lse)]
        torch.library.opcheck(backward, (*saved, *rest_of_it, False, None))


@in_pairs(
    {
        "strategy": STRATEGIES,
        "causal": [True, False],
        "kv_heads": [4, 2, 1],
        "dtype": [torch.float32, torch.float64, torch.bfloat16],
        "wants_lse": [True, False],
    }
)
def test_opcheck(one_rank, strategy, causal, kv_heads, dtype, wants_lse):
    leaves = make_operands(dtype, kv_heads)
    check(strategy, one_rank, leaves, 6, 6, causal, wants_lse=wants_lse)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_opcheck_of_strided_cross_attention(one_rank, strategy):
    given = make_operands(torch.float32, 2, q_len=3, kv_len=7, dims=(8, 5))
    leaves = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
    check(strategy, one_rank, leaves, 3, 7, True, ulysses_inner=False)


@pytest.mark.parametrize(("strategy", "layout"), LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
def test_opcheck_of_layouts(one_rank, strategy, layout, causal):
    leaves = make_operands(torch.float32, 2)
    check(strategy, one_rank, leaves, 6, 6, causal, layout=layout)


def attend(mesh, placements, strategy, kv_heads=8, **more):
    """Leaves, out and lse of cp attention, of DTensors [8, 8 or kv_heads, 8, 6]."""
    leaves = tuple(
        zeros_on(mesh, (8, heads, 8, 6), placements).requires_grad_()
        for heads in (8, kv_heads, kv_heads)
    )
    groups = (mesh.get_group("cp").group_name,)
    if strategy == "hybrid":
        of_hybrid = hybrid_groups(mesh, 1, CPDegrees(2, 2))
        groups += (of_hybrid.ulysses, of_hybrid.ring, True)
    return leaves, *attention(strategy)(*leaves, 8, 8, True, 0.3, *groups, **more)


DP = [Replicate(), Shard(0), Shard(1)]


@pytest.mark.parametrize("wants_lse", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "placements", list(itertools.product(DP, [*DP, Shard(2)])), ids=str
)
def test_the_sequence_is_sharded_on_cp_only(mesh, strategy, placements, wants_lse):
    leaves, out, lse = attend(mesh, placements, strategy, wants_lse=wants_lse)
    expected = (placements[0], Shard(2))
    assert out.placements == expected and out.shape == (8, 8, 8, 6)
    grads = torch.autograd.grad(out, leaves, out.detach(), retain_graph=True)
    if wants_lse or strategy in OWN_BACKWARD:
        assert lse.placements == expected and lse.shape == (8, 8, 8)
        assert lse.dtype == torch.float32
    if wants_lse:
        grads += torch.autograd.grad(lse, leaves[:2], lse.detach())
    elif strategy not in OWN_BACKWARD:
        assert lse.shape == (0,)  # nobody asked for it
    of_inputs = placements if strategy not in OWN_BACKWARD else expected
    for grad, leaf in zip(grads, leaves + leaves[:2], strict=False):
        assert grad.placements == of_inputs and grad.shape == leaf.shape


@pytest.mark.parametrize(("strategy", "layout"), LAYOUTS)
def test_the_rule_finds_the_group_of_a_layout(mesh, strategy, layout):
    leaves, out, _ = attend(mesh, (Shard(0), Shard(2)), strategy, layout=layout)
    assert out.placements == (Shard(0), Shard(2))
    grads = torch.autograd.grad(out, leaves, out.detach())
    assert all(grad.placements == out.placements for grad in grads)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("cp", "kv_heads"), [(Partial(), 8), (Shard(2), 1)])
def test_partial_results_and_heads_that_do_not_divide(mesh, strategy, cp, kv_heads):
    """The former are summed before; the sequence is split on cp, one head nowhere."""
    _, out, _ = attend(mesh, (Replicate(), cp), strategy, kv_heads)
    assert out.placements[1] == Shard(2) and out.shape == (8, 8, 8, 6)
    either = strategy in OWN_BACKWARD  # either costs the same
    assert out.placements[0] in ((Replicate(), Shard(0)) if either else (Replicate(),))


def test_a_mesh_that_is_made_twice_is_one(mesh):
    """DTensor may answer from its memory of the first one."""
    again = dist.device_mesh.init_device_mesh(
        "cpu", (2, 4), mesh_dim_names=("dp", "cp")
    )
    assert again == mesh
    for axis, name in enumerate(("dp", "cp")):
        assert axis_of_group(mesh, again.get_group(name).group_name) == axis


def test_a_group_that_is_no_axis_of_the_mesh(mesh):
    with pytest.raises(ValueError) as caught:
        axis_of_group(mesh, "nowhere")
    text = str(caught.value).replace(str(mesh), "MESH")
    assert_expected_inline(
        textwrap.fill(text, 80),
        """\
cp attention over group 'nowhere': no axis of MESH has that group; pass the name
of a group of the mesh that the tensors are sharded on""",
    )
