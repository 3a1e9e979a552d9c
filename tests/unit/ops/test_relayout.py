"""cp::relayout keeps torch's contract, its own, and its DTensor rule."""

import itertools
import textwrap

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile.geometry.layout import Chunks, Layout, TokenLayout
from cpcompile.ops import move_runs
from cpcompile.ops.comm.relayout import share
from tests.unit.ops.operands import zeros_on

relayout = torch.ops.cp.relayout
CPU = torch.device("cpu")
layouts = st.sampled_from(Layout)
PAIRS = list(itertools.product([x.value for x in Layout], repeat=2))


@settings(deadline=None)
@given(layouts, layouts, st.integers(0, 70), st.integers(1, 9))
def test_shares_move_every_token_to_its_place(source, target, length, ranks):
    """All ranks in one process, each token is its position."""
    everyone = range(ranks)
    before = [TokenLayout.of(source, length, ranks).positions(r) for r in everyone]
    leaving = [share(source, target, length, ranks, r, CPU) for r in everyone]
    arriving = [share(target, source, length, ranks, r, CPU) for r in everyone]
    mail = [x[s.moves].split(s.counts) for x, s in zip(before, leaving, strict=True)]
    permuted = TokenLayout.of(target, length, ranks).permutation()
    chunks = Chunks(length, ranks)
    for r in everyone:
        came = [mail[each][r] for each in everyone]
        assert [len(x) for x in came] == arriving[r].counts
        assert not len(came[r])
        after = torch.full_like(before[r], -1)
        after[arriving[r].stays] = before[r][leaving[r].stays]
        after[arriving[r].moves] = torch.cat(came)
        expected = permuted.narrow(0, chunks.start(r), chunks.count(r))
        assert torch.equal(after, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_opcheck(one_rank, dtype, dim):
    x = torch.arange(24).view(2, 3, 4).to(dtype)
    if dtype.is_floating_point:
        x.requires_grad_()
    args = (x, dim, x.shape[dim], "contiguous", "zigzag", one_rank)
    torch.library.opcheck(relayout.default, args)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_one_rank_gets_a_contiguous_copy(one_rank, source, target):
    x = torch.randn(5, 3, 2).transpose(0, 1)
    out = relayout(x, 1, 5, source, target, one_rank)
    assert torch.equal(out, x)
    assert out.is_contiguous()
    assert out.data_ptr() != x.data_ptr()


def test_the_same_layout_is_a_copy_without_exchange(mesh, monkeypatch):
    monkeypatch.setattr(dist, "all_to_all_single", None)
    x = torch.randn(2, 4)
    out = relayout(x, 1, 16, "fold", "fold", group_of(mesh))
    assert torch.equal(out, x)
    assert out.data_ptr() != x.data_ptr()


def group_of(mesh):
    return mesh.get_group("cp").group_name


def error(*args):
    """What relayout says; `args` are its arguments."""
    with pytest.raises(ValueError) as caught:
        relayout(*args)
    return textwrap.fill(str(caught.value), 80)


def test_other_numbers_of_tokens_and_groups(mesh):
    x = torch.zeros(2, 4, 3)
    assert_expected_inline(
        error(x, 1, 18, "zigzag", "contiguous", group_of(mesh)),
        """\
cp::relayout: got a tensor (2, 4, 3) with 4 tokens on dim 1, of a sequence of 18
on rank 1 of 4; needed 5 tokens. Pass as many as torch.chunk deals out, or a
DTensor sharded on that dim""",
    )
    x = distributed(mesh, (Shard(0), Shard(1)))
    assert_expected_inline(
        refusal(x, 1, 4, "contiguous", "fold", group_of(mesh)),
        """\
cp::relayout: got length 4 and dim 1 for a DTensor (8, 16, 8); needed its
dimension of so many tokens. Pass the length of the whole sequence""",
    )
    x = distributed(mesh, (Shard(0), Shard(1)))
    text = refusal(x, 1, 16, "contiguous", "fold", dist.group.WORLD.group_name)
    assert text.startswith("cp::relayout over group")
    assert "no axis of" in text


def test_layouts_and_dims_that_are_refused(one_rank):
    x = torch.zeros(2, 4)
    assert_expected_inline(
        error(x, 1, 4, "contiguous", "head_tail", one_rank),
        """\
cp::relayout: got layout 'head_tail'; needed one of contiguous, zigzag, striped,
fold. Pass the value of a Layout""",
    )
    text = error(x.to("meta"), 1, 4, "Zigzag", "fold", one_rank)  # while it is traced
    assert "got layout 'Zigzag'" in text
    x = torch.zeros(2, 4)
    assert_expected_inline(
        error(x, 2, 4, "contiguous", "fold", one_rank),
        """\
cp::relayout: got dim 2 of a tensor (2, 4); needed one of its 2 dimensions. Pass
the one of the tokens""",
    )
    assert "got dim -3 of" in error(x, -3, 4, "contiguous", "fold", one_rank)


def test_an_exchange_that_fails(mesh, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(dist, "all_to_all_single", fail)
    with pytest.raises(RuntimeError, match="connection closed") as caught:
        relayout(torch.zeros(4), 0, 16, "contiguous", "fold", group_of(mesh))
    (note,) = caught.value.__notes__
    assert_expected_inline(
        textwrap.fill(note.replace(repr(group_of(mesh)), "GROUP"), 80),
        """\
cpcompile: this exchange belongs to cp::relayout from contiguous to fold on rank
1 of 4 in group GROUP""",
    )


DP = [Replicate(), Shard(0), Shard(2), Partial()]
CP = [Replicate(), Shard(0), Shard(1), Shard(2), Partial()]


def distributed(mesh, placements, shape=(8, 16, 8)):
    """Zeros of this global shape, a leaf."""
    return zeros_on(mesh, shape, placements).requires_grad_()


@pytest.mark.parametrize("dim", [1, -2])
@pytest.mark.parametrize("placements", itertools.product(DP, CP), ids=str)
def test_the_rule_shards_the_tokens_on_cp_only(mesh, placements, dim):
    """On dp nothing changes, but what is partial is reduced."""
    x = distributed(mesh, placements)
    out = relayout(x, dim, 16, "contiguous", "striped", group_of(mesh))
    dp = Replicate() if placements[0].is_partial() else placements[0]
    assert out.placements == (dp, Shard(1))
    assert out.shape == x.shape
    (grad,) = torch.autograd.grad(out, x, out.detach())
    assert grad.placements == (dp, Shard(1))
    assert grad.shape == x.shape
    twice = distributed(mesh, (Shard(1), Shard(1)))  # tokens are on cp alone
    out = relayout(twice, dim, 16, "contiguous", "striped", group_of(mesh))
    assert out.placements == (Replicate(), Shard(1))


def test_other_dimensions_may_be_uneven(mesh):
    """Rank 0 of dp has two rows of three; tokens are 3, 3, 3 and 2."""
    x = distributed(mesh, (Shard(0), Shard(1)), (3, 11, 4))
    out = relayout(x, 1, 11, "fold", "zigzag", group_of(mesh))
    assert out.placements == (Shard(0), Shard(1))
    assert out.shape == (3, 11, 4)
    assert out.to_local().shape == (2, 3, 4)


def refusal(*args):
    """What the rule says; DTensor raises an error of its own from it."""
    with pytest.raises(RuntimeError, match=r"^cp::relayout") as caught:
        relayout(*args)
    assert isinstance(caught.value.__cause__, ValueError)
    return textwrap.fill(str(caught.value.__cause__), 80)


COUNTS, ORDER = [3, 0, 2, 1], [2, 3, 0, 1]
TOKENS = sum(COUNTS)


def operand(dtype=torch.float64, tokens=TOKENS):
    x = torch.randn(2, 3, tokens, 4).to(dtype)
    return x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_opcheck_of_token_runs(dtype):
    torch.library.opcheck(
        torch.ops.cp.move_runs.default, (operand(dtype), COUNTS, ORDER)
    )


def test_moves_runs_and_gradients_back():
    x = operand()
    found = move_runs(x, COUNTS, ORDER)
    parts = x.split(COUNTS, 2)
    wanted = torch.cat([parts[i] for i in ORDER], 2)
    assert torch.equal(found, wanted)
    assert found.is_contiguous()
    grad = torch.randn_like(found)
    (ours,) = torch.autograd.grad(found, x, grad, create_graph=True)
    (theirs,) = torch.autograd.grad(wanted, x, grad)
    assert torch.equal(ours, theirs)
    torch.autograd.gradcheck(lambda x: move_runs(x, COUNTS, ORDER), operand())
    torch.autograd.gradgradcheck(lambda x: move_runs(x, COUNTS, ORDER), operand())
