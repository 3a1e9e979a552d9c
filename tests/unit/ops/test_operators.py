"""The cp:: operators keep torch's contracts, their own, and their DTensor rule."""

import itertools
import textwrap

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.ops.dtensor.dtensor_rules import axis_of_group
from cpcompile.ranks.mesh_factors import hybrid_groups, remember_axes
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
        for grad_lse in (None, torch.ones_like(lse)):
            torch.library.opcheck(backward, (*saved, *rest_of_it, False, grad_lse))


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


def test_axes_of_groups(mesh):
    # DTensor may answer from its memory of the first one.
    again = dist.device_mesh.init_device_mesh(
        "cpu", (2, 4), mesh_dim_names=("dp", "cp")
    )
    assert again == mesh
    for axis, name in enumerate(("dp", "cp")):
        assert axis_of_group(mesh, again.get_group(name).group_name) == axis
    with pytest.raises(ValueError) as caught:
        axis_of_group(mesh, "nowhere")
    text = str(caught.value).replace(str(mesh), "MESH")
    assert_expected_inline(
        textwrap.fill(text, 80),
        """\
cp attention over group 'nowhere': no axis of MESH has that group; pass the name
of a group of the mesh that the tensors are sharded on""",
    )


ops = torch.ops.cp


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_opcheck_of_the_exchange(one_rank, kv_heads, dtype):
    given = make_operands(dtype, kv_heads, 6, 5, (8, 3))
    q, k, v = (x.requires_grad_() for x in given)
    torch.library.opcheck(
        ops.ulysses_scatter.default, ([q, k, v], [6, 5, 5], [6, 5, 5], one_rank)
    )
    heads = [4, kv_heads, kv_heads]
    torch.library.opcheck(
        ops.ulysses_gather.default,
        ([q, k, v], heads, [6, 5, 5], [6, 5, 5], one_rank),
    )


def text(caught):
    return textwrap.fill(str(caught.value), 80)


def test_chunks_of_another_length(one_rank):
    with pytest.raises(ValueError) as caught:
        ops.ulysses_scatter([torch.zeros(2, 4, 6, 8)], [7], [7], one_rank)
    assert_expected_inline(
        text(caught),
        """\
cp::ulysses_scatter: got a tensor (2, 4, 6, 8) [batch, heads, tokens, dim] on
rank 0 of 1; needed 7 tokens. Pass the chunks of the contiguous layout""",
    )
    with pytest.raises(ValueError, match=r"cp::ulysses_gather: .* needed 7 tokens"):
        ops.ulysses_gather([torch.zeros(2, 4, 6, 8)], [4], [7], [7], one_rank)


def test_groups_that_are_no_factors(mesh):
    groups = hybrid_groups(mesh, 1, CPDegrees(2, 2))
    group = mesh.get_group("cp").group_name
    x = torch.zeros(2, 4, 2, 8)
    with pytest.raises(ValueError) as caught:
        given = group, groups.ulysses, groups.ring, False
        attention("hybrid")(x, x, x, 8, 8, True, 0.3, *given)
    names = {group: "ALL", groups.ulysses: "ULYSSES", groups.ring: "RING"}
    message = text(caught)
    for name, better in names.items():
        message = message.replace(f"'{name}'", better)
    assert_expected_inline(
        message,
        """\
cp::hybrid_attention: rank 1 of 4 in group ALL is rank 1 of 2 in ULYSSES and 0 of 2
in RING, so rank 2 of 4 with ulysses_inner=False; needed groups that factorise it""",
    )


def test_degrees_that_are_no_factors(mesh):
    with pytest.raises(ValueError) as caught:
        hybrid_groups(mesh, 1, CPDegrees(3, 2))
    assert_expected_inline(
        text(caught),
        """\
hybrid attention: got degrees 3 (ulysses) and 2 (ring) for an axis of 4 ranks;
needed two numbers whose product it is""",
    )


def test_groups_of_a_mesh_axis(mesh):
    """Rank 1 is the second of the axis cp, which has the ranks 0 to 3."""

    def ranks_of(inner):
        groups = hybrid_groups(mesh, 1, CPDegrees(2, 2, inner))
        found = map(
            dist.distributed_c10d._resolve_process_group, (groups.ulysses, groups.ring)
        )
        return groups, [dist.get_process_group_ranks(group) for group in found]

    inner, ranks = ranks_of("ulysses")
    assert ranks == [[0, 1], [1, 3]]
    assert ranks_of("ring")[1] == [[1, 3], [0, 1]]
    assert hybrid_groups(mesh, 1, CPDegrees(2, 2, "ulysses")) is inner
    assert hybrid_groups(mesh["cp"], 0, CPDegrees(2, 2, "ulysses")) is inner


@pytest.mark.parametrize("names", [("ring", "ulysses"), ("ulysses", "ring")])
def test_the_axes_of_a_mesh_are_used(mesh, names):
    grid = init_device_mesh("cpu", (2, 4), mesh_dim_names=names)
    flat = grid._flatten()
    remember_axes(flat, grid)
    degrees = CPDegrees(grid["ulysses"].size(), grid["ring"].size(), names[1])
    groups = hybrid_groups(flat, 0, degrees)
    assert groups.ulysses == grid.get_group("ulysses").group_name
    assert groups.ring == grid.get_group("ring").group_name
    other = "ulysses" if names[1] == "ring" else "ring"
    assert hybrid_groups(flat, 0, CPDegrees(4, 2, other)) != groups
