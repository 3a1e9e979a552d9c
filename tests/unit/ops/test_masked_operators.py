"""The operators under a mask keep torch's contracts, and their DTensor rule."""

import itertools

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.support.attention_calls import attention, rest, rest_of_local
from tests.support.bounds import OPERAND_SCALE, assert_close
from tests.support.masked_calls import fields, under_mask
from tests.unit.ops.operands import make_operands, zeros_on

ops = torch.ops.cp
GROUPED = ["ring", "all_gather"]
LENGTH = 6


def key_ranges(batch=1, length=LENGTH):
    row = torch.arange(length)
    each = torch.stack([(row - 2).clamp(min=0), row + 1], -1)
    return each.int().expand(batch, -1, -1).contiguous()


def ids(batch=1, length=LENGTH):
    return (torch.arange(length) // 4).int().expand(batch, -1).contiguous()


# bias, key_ranges, q_segment_ids, kv_segment_ids
MASKS = {
    "key_ranges": lambda: (None, key_ranges(), None, None),
    "ids": lambda: (None, None, ids(2), ids()),
    "holes": lambda: (None, key_ranges(2), ids() % 2, ids(2) * 0),
    "bool": lambda: (torch.ones(2, 1, 6, 6, dtype=torch.bool).tril(), *[None] * 3),
    "bias": lambda: (torch.randn(1, 4, 6, 6), key_ranges(), None, None),
    "nothing": lambda: (None, key_ranges() * 0, None, None),
}


def calls(strategy, group, *masks, sizes=(LENGTH, LENGTH), **more):
    """Forward and backward of a strategy, and what is given to them after q, k, v."""
    names = f"{strategy}_attention", f"{strategy}_attention_backward"
    given = fields(*masks) | more
    if strategy == "local":
        others = rest_of_local(0.3, **given)
    else:
        others = rest(*sizes, False, 0.3, group, **given)
    return *(getattr(ops, name).default for name in names), others


@pytest.mark.parametrize("strategy", [*GROUPED, "local"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(one_rank, strategy, mask, dtype):
    q, k, v = (x.requires_grad_() for x in make_operands(dtype, 2))
    bias, *integers = MASKS[mask]()
    if bias is not None and bias.is_floating_point():
        bias = bias.to(dtype).requires_grad_()
    forward, backward, (extras, *others) = calls(strategy, one_rank, bias, *integers)
    torch.library.opcheck(forward, (q, k, v, extras, *others))
    with torch.no_grad():
        out, lse = forward(q, k, v, extras, *others)
        saved = [x.detach() for x in (torch.ones_like(out), q, k, v, out, lse)]
    wanted = bias is not None and bias.is_floating_point()
    saved.append([x.detach() for x in extras])
    for flag in {False, wanted}:
        torch.library.opcheck(backward, (*saved, *others, flag, None))


@pytest.mark.parametrize("strategy", [*GROUPED, "local"])
def test_opcheck_of_strided_cross_attention(one_rank, strategy):
    q, k, v = make_operands(torch.float32, 2, q_len=3, kv_len=7, dims=(8, 5))
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    masks = (None, None, ids(1, 3), ids(2, 7))
    forward, _, others = calls(strategy, one_rank, *masks, sizes=(3, 7))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(forward, (*leaves, *others))


@pytest.mark.parametrize("strategy", GROUPED)
def test_opcheck_of_zigzag(one_rank, strategy):
    operands = [x.requires_grad_() for x in make_operands(torch.float32, 2)]
    masks = MASKS["key_ranges"]()
    forward, _, others = calls(strategy, one_rank, *masks, layout="zigzag")
    torch.library.opcheck(forward, (*operands, *others))


DP_PLACEMENTS = [Replicate(), Shard(0), Shard(1)]
BIASES = [(1, 1), (4, 1), (1, 4), (4, 4)]


@pytest.mark.parametrize("strategy", GROUPED)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    ("dp", "bias_sizes"), list(itertools.product(DP_PLACEMENTS, BIASES)), ids=str
)
def test_the_rule(mesh, strategy, batch, dp, bias_sizes):
    """A mask is split on dp where it has what q is split on; see the rule's file."""
    group = mesh.get_group("cp").group_name
    q, k, v = (zeros_on(mesh, (4, 4, 8, 6), (dp, Shard(2))) for _ in range(3))
    of_bias = dp if isinstance(dp, Shard) and bias_sizes[dp.dim] > 1 else Replicate()
    bias = zeros_on(mesh, (*bias_sizes, 8, 8), (of_bias, Shard(2)))
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]
    integers = [
        DTensor.from_local(x, mesh, [Replicate(), Replicate()], run_check=False)
        for x in (key_ranges(batch, 8), ids(batch, 8), ids(batch, 8))
    ]
    op = under_mask(strategy)
    out, lse = op(*leaves, *integers, 8, 8, 0.3, group)
    assert out.placements == lse.placements == (dp, Shard(2))
    assert out.shape == (4, 4, 8, 6)
    *grads, dbias = torch.autograd.grad(out, leaves, out.detach())
    assert all(grad.placements == (dp, Shard(2)) for grad in grads)
    summed = isinstance(dp, Shard) and bias_sizes[dp.dim] == 1
    assert dbias.placements == (Partial() if summed else of_bias, Shard(2))
    assert dbias.shape == bias.shape


@pytest.mark.parametrize("strategy", [*GROUPED, "ulysses"])
def test_other_placements_are_brought_to_the_rule(mesh, strategy):
    """A replicated bias, and integers that somebody split."""
    group = mesh.get_group("cp").group_name
    everywhere = (Replicate(), Replicate())
    q, k, v = (zeros_on(mesh, (4, 4, 8, 6), (Shard(0), Shard(2))) for _ in range(3))
    bias = zeros_on(mesh, (1, 4, 8, 8), everywhere).requires_grad_()
    some = zeros_on(mesh, (4, 8, 2), (Shard(0), Shard(1)), torch.int32)
    op = under_mask(strategy)
    out, _ = op(q, k, v, bias, some, None, None, 8, 8, 0.3, group)
    assert out.placements == (Shard(0), Shard(2))
    (grad,) = torch.autograd.grad(out, bias, out.detach())
    assert grad.shape == bias.shape


SIZES = "of 6 queries, 6 of them local, and 6 keys got "
PASS = (
    ". Pass integers of the whole sequences, and of the bias the rows of the local "
    "queries"
)
REFUSED = {
    "limits of other rows": (
        {"key_ranges": key_ranges(1, 5)},
        f"{SIZES}key_ranges (1, 5, 2), needed (2, 6, 2), or 1 for 2{PASS}",
    ),
    "limits that are no integers": (
        {"strategy": "all_gather", "key_ranges": key_ranges().float()},
        f"{SIZES}key_ranges torch.float32, needed integers{PASS}",
    ),
    "ids of queries only": (
        {"strategy": "ulysses", "q_segment_ids": ids()},
        f"{SIZES}only one of q_segment_ids and kv_segment_ids, needed both or "
        f"none{PASS}",
    ),
    "a bias of all rows where some are local": (
        {"bias": torch.zeros(3, 1, 7, 6)},
        f"{SIZES}bias (3, 1, 7, 6), needed (2, 4, 6, 6), or of floating point with one "
        f"of (6, 11) in the place of the last two, or 1 for B, H{PASS}",
    ),
    "a bias of integers": (
        {"bias": torch.zeros(1, 1, 6, 6).int()},
        f"{SIZES}bias torch.int32, needed bool or floating point{PASS}",
    ),
    "a bias in zigzag": (
        {"layout": "zigzag", "bias": torch.zeros(1, 1, 6, 6)},
        "got a bias (1, 1, 6, 6) in the zigzag layout; needed a mask of key ranges, "
        "segment ids and a bias of positions, or the contiguous layout",
    ),
    "other numbers of keys in zigzag": (
        {"layout": "zigzag", "q_len": 5, "key_ranges": key_ranges(1, 5)},
        "got 5 queries and 6 keys in the zigzag layout; needed as many keys as "
        "queries, or the contiguous layout",
    ),
    "a layout that is not supported": (
        {"layout": "striped", "key_ranges": key_ranges()},
        "got layout='striped'; needed one of ['contiguous', 'zigzag']",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_masks_that_are_refused(one_rank, case):
    given, said = REFUSED[case]
    given = {"strategy": "ring", "layout": "contiguous", "q_len": LENGTH} | given
    strategy, layout, q_len = map(given.pop, ("strategy", "layout", "q_len"))
    masks = map(given.get, ("bias", "key_ranges", "q_segment_ids", "kv_segment_ids"))
    q, k, v = make_operands(torch.float32, 4, q_len=q_len)
    with pytest.raises(ValueError) as caught:
        sizes = (q_len, LENGTH, 0.3, one_rank)
        under_mask(strategy)(q, k, v, *masks, *sizes, layout=layout)
    assert str(caught.value) == f"cp::{strategy}_attention: {said}"


@pytest.mark.parametrize("strategy", [*GROUPED, "ulysses"])
def test_causal_attention_under_a_mask(one_rank, strategy):
    """Limits say it; a mask beside the flag would be read without it."""
    q, k, v = make_operands(torch.float32, 4)
    op = attention(strategy)
    with pytest.raises(ValueError, match="got is_causal, needed it in the key ranges"):
        op(q, k, v, LENGTH, LENGTH, True, 0.3, one_rank, key_ranges=key_ranges())


def test_several_runs_of_tokens_under_a_mask(one_rank):
    q, k, v = make_operands(torch.float64, 4)
    sizes, masks = (LENGTH, LENGTH, False, 0.3, one_rank), {"key_ranges": key_ranges()}
    several = attention("ring")(q, k, v, *sizes, runs=(2, 3, 3), **masks)
    one = attention("ring")(q, k, v, *sizes, **masks)
    for name, *each in zip(("out", "lse"), several, one, strict=False):
        assert_close(name, *each, floor=OPERAND_SCALE)
    with pytest.raises(ValueError, match="got 2 runs of tokens in the zigzag layout"):
        more = {"runs": (2, 3, 3), "layout": "zigzag"}
        attention("ring")(q, k, v, *sizes, **masks, **more)
