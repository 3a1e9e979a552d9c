"""What the attention operators say to operands and layouts that they do not take."""

import pytest
import torch

from cpcompile.geometry.layout import Chunks
from cpcompile.ops.strategies.contract import check_operands
from tests.support.attention_calls import attention, groups_of
from tests.unit.ops.operands import make_operands

RIGHT = (2, 4, 4, 8)
SINGLE, HALF = torch.float32, torch.bfloat16


DIMS = "k needs the head dim of q, and v the other dims of k"
HEADS = "the query heads need to be a multiple of the key heads"
# Shapes of q, k and v, what else is given, and what is said to be needed.
REFUSED = {
    "three dimensions": (
        [(4, 4, 8)] * 3,
        {},
        "q, k and v need four dimensions [batch, heads, tokens, dim]",
    ),
    "heads that do not divide": ([RIGHT, *[(2, 3, 4, 8)] * 2], {}, HEADS),
    "no key heads": ([RIGHT, *[(2, 0, 4, 8)] * 2], {}, HEADS),
    "queries": ([RIGHT] * 3, {"q_len": 7}, "rank 1 needs 3 queries"),
    "keys": ([RIGHT] * 3, {"kv_len": 9, "rank": 0}, "rank 0 needs 5 keys"),
    "head dims": ([RIGHT, *[(2, 4, 4, 16)] * 2], {}, DIMS),
    "keys and values": ([RIGHT, RIGHT, (2, 4, 3, 8)], {}, DIMS),
    "batches": (
        [RIGHT, *[(3, 4, 4, 8)] * 2],
        {},
        "q and k need the same batch",
    ),
    "dtypes": (
        [RIGHT] * 3,
        {"dtypes": (SINGLE, HALF, HALF)},
        "one dtype is needed, got torch.float32, torch.bfloat16, torch.bfloat16",
    ),
}


def refusal(shapes, dtypes=(SINGLE,) * 3, q_len=8, kv_len=8, rank=1):
    """What check_operands says to operands of these shapes on rank `rank` of 2."""
    q, k, v = (torch.empty(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True))
    lengths = Chunks(q_len, 2), Chunks(kv_len, 2)
    with pytest.raises(ValueError) as caught:
        check_operands("cp::ring_attention", q, k, v, *lengths, rank)
    return str(caught.value)


@pytest.mark.parametrize("case", REFUSED)
def test_operands_that_are_refused(case):
    shapes, given, needed = REFUSED[case]
    q, k, v = shapes
    assert refusal(shapes, **given) == (
        f"cp::ring_attention: got q {q}, k {k}, v {v} of sequences of "
        f"{given.get('q_len', 8)} queries and {given.get('kv_len', 8)} keys on 2 ranks:"
        f" {needed}. Pass contiguous chunks as torch.chunk makes them, or DTensors "
        "sharded on the sequence."
    )


@pytest.mark.parametrize("lengths", [(7, 6), (6, 7)])
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses", "hybrid"])
def test_the_operators_check(one_rank, strategy, lengths):
    q, k, v = make_operands(torch.float32, 4)
    needed = "rank 0 needs 7 queries" if lengths[0] == 7 else "rank 0 needs 7 keys"
    groups = groups_of(strategy, one_rank)
    with pytest.raises(ValueError, match=f"cp::{strategy}_attention: .* {needed}"):
        attention(strategy)(q, k, v, *lengths, True, 0.3, *groups)


CROSSED = (
    "got 6 queries and 7 keys, at most 6 and 7 on a rank, in the zigzag layout; causal "
    "attention needs as many keys as queries, or the contiguous layout"
)
NEEDED = "needed one of ['contiguous', 'zigzag']"
LAYOUTS = {  # strategy, layout, keys, causal; what else is given; what is said
    "striped": (
        *(("all_gather", "striped", 6, False), {}),
        f"got layout='striped'; {NEEDED}",
    ),
    "fold": (("hybrid", "fold", 6, True), {}, f"got layout='fold'; {NEEDED}"),
    "attention alone": (
        *(("local", "zigzag", 6, False), {}),
        "got layout='zigzag'; needed one of ['contiguous']",
    ),
    **{
        f"causal cross attention in {x}": ((x, "zigzag", 7, True), {}, CROSSED)
        for x in ("ring", "all_gather", "hybrid")
    },
    "a ring that is not outside": (
        *(("hybrid", "zigzag", 6, True), {"inner": False}),
        "got layout='zigzag' with rings of consecutive ranks; needed "
        "ulysses_inner=True, or the contiguous layout",
    ),
    "several runs": (
        *(("ring", "zigzag", 6, False), {"runs": (2, 3, 3)}),
        "got 2 runs of tokens in the zigzag layout; needed one, or the contiguous "
        "layout",
    ),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts_that_are_refused(one_rank, case):
    (strategy, layout, keys, causal), more, needed = LAYOUTS[case]
    q, k, v = make_operands(torch.float32, 4, 6, keys)
    groups = groups_of(strategy, one_rank, more.get("inner", True))
    more = {name: x for name, x in more.items() if name != "inner"}
    sizes = (0.3,) if strategy == "local" else (6, keys, causal, 0.3, *groups)
    with pytest.raises(ValueError) as caught:
        attention(strategy)(q, k, v, *sizes, layout=layout, **more)
    assert str(caught.value) == f"cp::{strategy}_attention: {needed}"


Q = torch.randn(2, 4, 5, 8)
SEEDS = torch.zeros(2, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"softcap": -1.0}, "softcap -1.0, needed it positive, or 0 for none"),
        ({"dropout_p": 1.0, "seeds": SEEDS}, "dropout_p 1.0, needed it in [0, 1)"),
        ({"dropout_p": 0.5}, "seeds None, needed (2, 4)"),
        ({"dropout_p": 0.5, "seeds": SEEDS[:1]}, "seeds (1, 4), needed (2, 4)"),
        ({"seeds": SEEDS}, "seeds (2, 4), needed none without dropout"),
        (
            {"sinks": torch.zeros(3)},
            "attention of 4 heads: got sinks (3,); needed [4], one number per head",
        ),
    ],
    ids=str,
)
def test_bad_arguments(given, text):
    with pytest.raises(ValueError) as caught:
        attention("local")(Q, Q, Q, 0.5, **given)
    assert text in str(caught.value)


def test_right_arguments_pass():
    changes = {"softcap": 2.0, "dropout_p": 0.5, "seeds": SEEDS}
    out, lse = attention("local")(Q, Q, Q, 0.5, sinks=torch.zeros(4), **changes)
    assert out.isfinite().all() and lse.isfinite().all()
