"""What the attention operators say to operands and layouts that they do not take."""

import textwrap

import pytest
import torch
from expecttest import assert_expected_inline

from cpcompile.geometry.layout import Chunks
from cpcompile.ops.strategies.contract import check_operands
from tests.support.attention_calls import attention
from tests.unit.ops.operands import make_operands

STRATEGIES = ["ring", "all_gather"]


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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_operators_check(one_rank, strategy):
    q, k, v = make_operands(torch.float32, 4)
    text = f"cp::{strategy}_attention: .* rank 0 needs 7 queries"
    with pytest.raises(ValueError, match=text):
        attention(strategy)(q, k, v, 7, 6, True, 0.3, one_rank)


def layout_message(group, strategy, layout, q_len=6, kv_len=6, causal=True, **more):
    """What an operator on one rank says to this layout."""
    q, k, v = make_operands(torch.float32, 4, q_len, kv_len)
    with pytest.raises(ValueError) as caught:
        sizes = (q_len, kv_len, causal, 0.3, group)
        attention(strategy)(q, k, v, *sizes, layout=layout, **more)
    return textwrap.fill(str(caught.value), 80)


def test_layouts_that_a_strategy_has_not(one_rank):
    assert_expected_inline(
        layout_message(one_rank, "all_gather", "striped", causal=False),
        """\
cp::all_gather_attention: got layout='striped'; needed one of ['contiguous',
'zigzag']""",
    )


@pytest.mark.parametrize("strategy", ["ulysses", "split_kv", "local"])
def test_no_other_layout_is_taken_for_the_contiguous_one(one_rank, strategy):
    q, k, v = make_operands(torch.float32, 4)
    sizes = (0.3,) if strategy == "local" else (6, 6, False, 0.3, one_rank)
    text = f"cp::{strategy}_attention: got layout='zigzag'; needed one of"
    with pytest.raises(ValueError, match=text):
        attention(strategy)(q, k, v, *sizes, layout="zigzag")


def test_causal_cross_attention_has_no_layout(one_rank):
    assert_expected_inline(
        layout_message(one_rank, "ring", "zigzag", kv_len=7),
        """\
cp::ring_attention: got 6 queries and 7 keys, at most 6 and 7 on a rank, in the
zigzag layout; causal attention needs as many keys as queries, or the contiguous
layout""",
    )
    text = layout_message(one_rank, "all_gather", "zigzag", kv_len=7)
    assert "cp::all_gather_attention: got 6 queries and 7 keys" in text


def test_several_runs_have_no_layout(one_rank):
    assert_expected_inline(
        layout_message(one_rank, "ring", "zigzag", causal=False, runs=(2, 3, 3)),
        """\
cp::ring_attention: got 2 runs of tokens in the zigzag layout; needed one, or
the contiguous layout""",
    )
