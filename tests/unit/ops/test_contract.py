"""What the operators refuse, and the text that says all that they compute."""

import itertools
import textwrap
from dataclasses import fields, replace

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from cpcompile.geometry.layout import Chunks, Layout
from cpcompile.ops.attention_spec import (
    EXTRAS,
    MASK_FIELDS,
    AttentionInputs,
    AttentionSpec,
)
from cpcompile.ops.strategies.contract import check_operands
from tests.support.attention_calls import attention, groups_of, rest
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


PLAIN = AttentionSpec(scale=0.3)
OTHERS = {  # by field, what is not PLAIN's
    "scale": [0.30000000000000004, -0.3, 0.0, float("inf")],
    "is_causal": [True],
    "layout": [Layout.ZIGZAG, Layout.STRIPED, Layout.FOLD],
    "extras": [("bias",), ("bias", "sinks"), ("sinks", "bias"), EXTRAS],
    "mask_key": ["0f3a"],
    "softcap": [1e-30, 30.0],
    "dropout_p": [0.1, 0.1 + 2**-56],
    "score_mod": ["f(x)\n", "f(x)", "f(x) lse", " f(x)"],
    "first_head": [1, 12],
    "last_head": [1, 12],
    "head_groups": [2, 4],
    "whole_keys": [True],
    "wants_lse": [True],
}
numbers = st.floats(allow_nan=False)
subsets = st.lists(st.sampled_from(EXTRAS), unique=True).map(tuple)
specs = st.builds(
    AttentionSpec,
    scale=numbers,
    is_causal=st.booleans(),
    layout=st.sampled_from(Layout),
    extras=subsets,
    mask_key=st.from_regex(r"[0-9a-f]*", fullmatch=True),
    softcap=numbers,
    dropout_p=numbers,
    score_mod=st.text() | st.just('def f(x):\n    return "score_mod=" + x\n'),
    first_head=st.integers(0, 1000),
    last_head=st.integers(0, 1000),
    head_groups=st.integers(1, 64),
    whole_keys=st.booleans(),
    wants_lse=st.booleans(),
)


@given(specs)
def test_a_text_is_read_back(spec):
    text = str(spec)
    assert AttentionSpec.of_text(text) == spec
    assert text.isascii()
    assert len(text.splitlines()) == 1  # of a graph that is printed
    in_other_order = AttentionSpec.of_text("+bias scale=0.3 zigzag causal")
    assert str(in_other_order) == "causal zigzag scale=0.3 +bias"


def test_every_field_is_in_the_text():
    """So that it is in every cache key."""
    assert list(OTHERS) == [field.name for field in fields(AttentionSpec)]
    changed = [
        replace(PLAIN, **{name: value})
        for name, values in OTHERS.items()
        for value in values
    ]
    for one, other in itertools.combinations([PLAIN, *changed], 2):
        assert str(one) != str(other)
    for spec in changed:
        assert AttentionSpec.of_text(str(spec)) == spec


def test_how_it_reads():
    assert str(PLAIN) == "scale=0.3"
    spec = AttentionSpec(
        scale=0.125,
        is_causal=True,
        layout=Layout.ZIGZAG,
        extras=("bias", "sinks"),
        mask_key="0f3a",
        softcap=30.0,
        dropout_p=0.1,
        score_mod="def forward():\n    pass",
        first_head=4,
        wants_lse=True,
    )
    assert_expected_inline(
        textwrap.fill(str(spec), 80),
        """\
causal zigzag scale=0.125 softcap=30.0 dropout_p=0.1 first_head=4 mask_key=0f3a
+bias +sinks lse score_mod="def forward():\\n    pass\"""",
    )


def refused(text):
    with pytest.raises(ValueError) as caught:
        AttentionSpec.of_text(text)
    return textwrap.fill(str(caught.value), 80)


def test_a_layout_that_there_is_not():
    assert_expected_inline(
        refused("diagonal scale=1.0"),
        """\
attention: got 'diagonal' in the spec 'diagonal scale=1.0'; needed one of
['causal', 'whole_keys', 'lse'], a layout of ['contiguous', 'zigzag', 'striped',
'fold'], a tensor of ['+bias', '+key_ranges', '+q_segment_ids',
'+kv_segment_ids', '+seeds', '+sinks'], or a value of ['scale', 'softcap',
'dropout_p', 'first_head', 'last_head', 'head_groups', 'mask_key']: make the
text by AttentionSpec""",
    )


WORDS = [
    "Causal",
    "causal=1",
    "+",
    "+mask",
    "bias",
    "scale",
    "lse=1",
    "zigzag=1",
    "a=b",
]
NOT_READ = {f"causal {x} scale=1.0": f"attention: got {x!r} in" for x in WORDS}
NOT_READ |= {
    x: f"attention: got the spec {x!r}; needed a scale in it"
    for x in ("", "causal", "causal softcap=1.0 +bias")
}
VALUES = ["scale=one", "scale=", "scale=1.0 first_head=0.5", "scale=1.0 score_mod=f"]


@pytest.mark.parametrize("text", [*NOT_READ, *VALUES])
def test_texts_of_no_spec(text):
    assert refused(text).startswith(NOT_READ.get(text, ""))


def test_which_tensors_it_names():
    bias, sinks = torch.zeros(1), torch.ones(1)
    spec, extras = PLAIN.with_extras({"sinks": sinks, "seeds": None, "bias": bias})
    assert spec == replace(PLAIN, extras=("bias", "sinks"))
    assert extras[0] is bias and extras[1] is sinks and len(extras) == 2
    inputs = AttentionInputs.of(str(spec), extras)
    assert inputs.bias is bias and inputs.sinks is sinks
    assert inputs.tensors.keys() == {"bias", "sinks"}
    assert inputs.arguments() == (extras, str(spec))
    given = AttentionInputs.of("scale=0.3 +bias +sinks", [torch.zeros(1)] * 2)
    ranges = torch.ones(1, dtype=torch.int32)
    inputs = replace(given, bias=None, key_ranges=ranges)
    extras, text = inputs.arguments()
    assert AttentionSpec.of_text(text) == replace(PLAIN, extras=("key_ranges", "sinks"))
    assert extras[0] is ranges


@pytest.mark.parametrize("count", [0, 1, 3])
def test_more_or_fewer_tensors_than_it_names(one_rank, count):
    q, k, v = make_operands(torch.float32, 4)
    spec = "scale=0.3 +key_ranges +sinks"
    _, sizes, _, group = rest(6, 6, False, 0.3, one_rank)
    tensors = [torch.zeros(1)] * count
    text = rf"got {count} tensors with the spec '{spec}'; needed 2"
    text = text.replace("+", r"\+")
    with pytest.raises(ValueError, match=text):
        torch.ops.cp.ring_attention(q, k, v, tensors, sizes, spec, group)
    with pytest.raises(ValueError, match=text):
        torch.ops.cp.ulysses_attention(q, k, v, tensors, sizes, spec, group)


@pytest.mark.parametrize("name", EXTRAS)
def test_masks_are_modifiers(name):
    """Seeds belong to dropout, and sinks are for any kernel; changes of scores are."""
    inputs = AttentionInputs.of(f"scale=0.3 +{name}", [torch.zeros(1)])
    assert inputs.has_modifiers == inputs.spec.has_modifiers == (name in MASK_FIELDS)
    for change in ("softcap=1.0", "dropout_p=0.5", 'score_mod="f"'):
        spec = AttentionInputs.of(f"scale=0.3 {change}", []).spec
        assert spec.has_modifiers and not spec.has_mask
