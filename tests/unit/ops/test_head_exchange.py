"""The operators that exchange heads keep torch's contracts, and their own."""

import textwrap

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch.distributed.device_mesh import init_device_mesh

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.ranks.mesh_factors import hybrid_groups, remember_axes
from tests.support.attention_calls import attention
from tests.unit.ops.operands import make_operands

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
