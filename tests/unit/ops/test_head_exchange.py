"""The operators that exchange heads keep torch's contracts, and their own."""

import textwrap

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.ranks.mesh_factors import hybrid_groups, remember_axes
from tests.support.attention_calls import attention, groups_of, rest
from tests.unit.ops.operands import make_operands, zeros_on

ops = torch.ops.cp
STRATEGIES = ["ulysses", "hybrid"]
# Of four heads and a batch of four, which do not divide by all eight ranks.
PLACEMENTS = [
    (dp, cp)
    for dp in (Replicate(), Shard(0), Shard(1))
    for cp in (Replicate(), Shard(0), Shard(1), Shard(2))
    if dp != cp or dp.is_replicate()
]


def operands(*sizes, **others):
    return [x.requires_grad_() for x in make_operands(*sizes, **others)]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_opcheck_of_the_exchange(one_rank, kv_heads, dtype):
    q, k, v = operands(dtype, kv_heads, 6, 5, (8, 3))
    torch.library.opcheck(
        ops.ulysses_scatter.default, ([q, k, v], [6, 5, 5], [6, 5, 5], one_rank)
    )
    heads = [4, kv_heads, kv_heads]
    torch.library.opcheck(
        ops.ulysses_gather.default,
        ([q, k, v], heads, [6, 5, 5], [6, 5, 5], one_rank),
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_opcheck_of_attention(one_rank, strategy, causal, kv_heads, dtype):
    groups = groups_of(strategy, one_rank)
    op = getattr(ops, f"{strategy}_attention").default
    given = rest(6, 6, causal, 0.3, *groups)
    torch.library.opcheck(op, (*operands(dtype, kv_heads), *given))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_opcheck_with_the_log_sum_exp(one_rank, strategy):
    groups = groups_of(strategy, one_rank)
    op = getattr(ops, f"{strategy}_attention").default
    given = rest(6, 6, True, 0.3, *groups, wants_lse=True)
    torch.library.opcheck(op, (*operands(torch.bfloat16, 2), *given))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_opcheck_of_strided_cross_attention(one_rank, strategy):
    given = operands(torch.float32, 2, q_len=3, kv_len=7, dims=(8, 5))
    leaves = [
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        for x in given
    ]
    groups = groups_of(strategy, one_rank, ulysses_inner=False)
    op = getattr(ops, f"{strategy}_attention").default
    torch.library.opcheck(op, (*leaves, *rest(3, 7, True, 0.3, *groups)))


@pytest.mark.parametrize("causal", [True, False])
def test_opcheck_of_a_layout(one_rank, causal):
    given = rest(6, 6, causal, 0.3, *groups_of("hybrid", one_rank), layout="zigzag")
    op = ops.hybrid_attention.default
    torch.library.opcheck(op, (*operands(torch.float32, 2), *given))


def attend(mesh, placements, strategy, kv_heads=4, **more):
    """Leaves, out and lse of cp attention, of DTensors [4, 4 or kv_heads, 8, 6]."""

    leaves = tuple(
        zeros_on(mesh, (4, heads, 8, 6), placements).requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    )
    groups = (mesh.get_group("cp").group_name,)
    if strategy == "hybrid":
        of_hybrid = hybrid_groups(mesh, 1, CPDegrees(2, 2))
        groups += (of_hybrid.ulysses, of_hybrid.ring, True)
    return leaves, *attention(strategy)(*leaves, 8, 8, True, 0.3, *groups, **more)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_the_sequence_is_sharded_on_cp_only(mesh, strategy, placements):
    leaves, out, lse = attend(mesh, placements, strategy)
    assert out.placements == (placements[0], Shard(2))
    assert out.shape == (4, 4, 8, 6)
    assert lse.shape == (0,)  # nobody asked for it
    grads = torch.autograd.grad(out, leaves, out.detach())
    assert [grad.shape for grad in grads] == [leaf.shape for leaf in leaves]
    assert all(grad.placements == placements for grad in grads)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dp", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_the_log_sum_exp_is_placed_as_the_result(mesh, strategy, dp):
    leaves, out, lse = attend(mesh, (dp, Shard(2)), strategy, wants_lse=True)
    assert lse.placements == out.placements == (dp, Shard(2))
    assert lse.shape == (4, 4, 8)
    assert lse.dtype == torch.float32
    grads = torch.autograd.grad(lse, leaves[:2], lse.detach())
    assert [grad.placements for grad in grads] == [(dp, Shard(2))] * 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_partial_results_are_summed_before(mesh, strategy):
    _, out, _ = attend(mesh, (Replicate(), Partial()), strategy)
    assert out.placements == (Replicate(), Shard(2))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_heads_that_do_not_divide_are_not_sharded(mesh, strategy):
    """One key head cannot be split on dp=2; the sequence still is, on cp."""
    _, out, _ = attend(mesh, (Replicate(), Shard(2)), strategy, kv_heads=1)
    assert out.placements == (Replicate(), Shard(2))


def test_the_operators_check(one_rank):
    q, k, v = operands(torch.float32, 4)
    with pytest.raises(ValueError, match=r"cp::ulysses_attention: .* needs 7 queries"):
        attention("ulysses")(q, k, v, 7, 6, True, 0.3, one_rank)
    with pytest.raises(ValueError, match=r"cp::hybrid_attention: .* needs 7 keys"):
        groups = groups_of("hybrid", one_rank)
        attention("hybrid")(q, k, v, 6, 7, True, 0.3, *groups)


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


def ranks_of(name):
    group = dist.distributed_c10d._resolve_process_group(name)
    return dist.get_process_group_ranks(group)


def test_groups_of_a_mesh_axis(mesh):
    """Rank 1 is the second of the axis cp, which has the ranks 0 to 3."""
    inner = hybrid_groups(mesh, 1, CPDegrees(2, 2, "ulysses"))
    assert (ranks_of(inner.ulysses), ranks_of(inner.ring)) == ([0, 1], [1, 3])
    outer = hybrid_groups(mesh, 1, CPDegrees(2, 2, "ring"))
    assert (ranks_of(outer.ulysses), ranks_of(outer.ring)) == ([1, 3], [0, 1])
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


@pytest.mark.parametrize(
    ("layout", "inner", "kv_len", "text"),
    [
        ("fold", True, 6, "needed one of"),
        ("zigzag", False, 6, "needed ulysses_inner=True"),
        ("zigzag", True, 7, "as many keys as queries"),
    ],
)
def test_layouts_of_a_hybrid(one_rank, layout, inner, kv_len, text):
    given = (*operands(torch.float32, 4, 6, kv_len), 6, kv_len, True, 0.3)
    groups = groups_of("hybrid", one_rank, inner)
    with pytest.raises(ValueError, match=f"cp::hybrid_attention: got .*{text}"):
        attention("hybrid")(*given, *groups, layout=layout)
