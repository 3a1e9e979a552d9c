"""Attention that models write out becomes one call, in every form that is known.

Of all lengths, whatever asks, and wherever its tokens begin; what looks alike stays.
"""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from cpcompile.reporting.graph_report import recording
from tests.golden.capture import capture, changes, fake_mesh
from tests.golden.golden_text import assert_golden, table
from tests.golden.operands import QKV
from tests.support.forms.attention_pattern_forms import FORMS, Model
from tests.support.forms.flex_forms import gradients_on_cpu
from tests.support.forms.query_forms import (
    ASKING,
    WIDTH,
    Asking,
    Captions,
    Rows,
    RowsFlattened,
)
from tests.support.forms.torch_forms import TABLE, TorchForm, numbers_of_torch, pattern


def folded(mesh, *names, dtype=torch.float32):
    """What the pass makes of these forms."""
    texts = {}
    for name in names:
        form = FORMS[name]
        more = {"sinks": torch.randn(4), "table": torch.randn(16, 4)}
        given = form.__code__.co_varnames[3 : form.__code__.co_argcount]
        inputs = (*torch.randn(3, 2, 4, 6, 8, dtype=dtype), *(more[x] for x in given))
        found = capture(
            form, *inputs, mesh=mesh, shard=QKV, until="fold_attention_patterns"
        )
        step = found["fold_attention_patterns"]
        assert step.rewrites == 1, found.error
        texts[name] = changes(step)
    return table(texts)


def test_masks_that_are_filled_in(mesh):
    assert_golden(
        folded(mesh, "filled", "filled_low", "chosen_tensor"),
        """\
filled:
  + logical_not = logical_not(eq)
  + plain_attention = plain_attention(l_q_, l_k_, l_v_, scale=0.353553,
      attn_mask=logical_not)
  ~ return: matmul_1 -> plain_attention
  - transpose, matmul, mul, masked_fill, softmax, matmul
filled_low:
  + unsqueeze = unsqueeze(hidden, 0)
  + unsqueeze_1 = unsqueeze(unsqueeze, 1)
  + to = to(unsqueeze_1, torch.float32)
  + mul = mul(to, -8.50706e+37)
  + plain_attention = plain_attention(l_q_, l_k_, l_v_, scale=0.5, attn_mask=mul)
  ~ return: matmul_1 -> plain_attention
  - mT, matmul, truediv, masked_fill, softmax, matmul
chosen_tensor:
  + unsqueeze = unsqueeze(tril, 0)
  + unsqueeze_1 = unsqueeze(unsqueeze, 1)
  + logical_not = logical_not(unsqueeze_1)
  + to = to(logical_not, torch.float32)
  + mul = mul(to, -8.50706e+37)
  + plain_attention = plain_attention(l_q_, l_k_, l_v_, scale=1, attn_mask=mul)
  ~ return: matmul_1 -> plain_attention
  - transpose, matmul, where, softmax, matmul""",
    )


def test_what_is_written_in_place_or_read_for_its_shape(mesh):
    """Nothing that reads the scores for their shape or dtype is left."""
    assert_golden(
        folded(mesh, "in_place", "of_the_shape"),
        """\
in_place:
  + unsqueeze = unsqueeze(arange, 0)
  + unsqueeze_1 = unsqueeze(unsqueeze, 1)
  + unsqueeze_2 = unsqueeze(unsqueeze_1, 2)
  + unsqueeze_3 = unsqueeze(invert, 0)
  + unsqueeze_4 = unsqueeze(unsqueeze_3, 1)
  + expand = expand(unsqueeze_2, 1, 1, 6, 6)
  + masked_fill = masked_fill(expand, unsqueeze_4, -inf)
  + plain_attention = plain_attention(l_q_, l_k_, l_v_, scale=0.5,
      attn_mask=masked_fill)
  ~ return: matmul_1 -> plain_attention
  - mT, matmul, imul, iadd, masked_fill_, softmax, matmul
of_the_shape:
  + type_as = to(arange, torch.float32)
  + unsqueeze = unsqueeze(type_as, 0)
  + unsqueeze_1 = unsqueeze(unsqueeze, 1)
  + unsqueeze_2 = unsqueeze(unsqueeze_1, 2)
  + masked_fill_1 = masked_fill(unsqueeze_2, view, -inf)
  + plain_attention = plain_attention(l_q_, l_k_, l_v_, scale=1,
      attn_mask=masked_fill_1)
  ~ return: matmul_1 -> plain_attention
  - mT, matmul, type_as, add, expand_as, masked_fill, softmax, matmul""",
    )


def test_biases(mesh):
    assert_golden(
        folded(mesh, "alibi", "low_then_added"),
        """\
alibi:
  + unflatten = unflatten(heads, 0, (2, 4))
  + unflatten_1 = unflatten(reshape_1, 0, (2, 4))
  + unflatten_2 = unflatten(flatten_1, 0, (2, 4))
  + unflatten_3 = unflatten(reshape, 0, (2, 4))
  + unsqueeze = unsqueeze(invert, 0)
  + unsqueeze_1 = unsqueeze(unsqueeze, 1)
  + expand_1 = expand(unflatten_3, 2, 4, 6, 6)
  + masked_fill_1 = masked_fill(expand_1, unsqueeze_1, -8.50706e+37)
  + plain_attention = plain_attention(unflatten, unflatten_1, unflatten_2, scale=0.5,
      attn_mask=masked_fill_1)
  + flatten_2 = flatten(plain_attention, 0, 1)
  ~ view_2: bmm -> flatten_2
  - transpose, baddbmm, view, masked_fill, softmax, to, view, bmm
low_then_added:
  + unsqueeze = unsqueeze(seen, 0)
  + unsqueeze_1 = unsqueeze(unsqueeze, 1)
  + logical_not = logical_not(unsqueeze_1)
  + to = to(logical_not, torch.float32)
  + mul = mul(to, -8.50706e+37)
  + add_1 = add(mul, padding_1)
  + plain_attention = plain_attention(l_q_, l_k_, l_v_, scale=0.5, attn_mask=add_1)
  ~ return: matmul_1 -> plain_attention
  - mT, matmul, div, where, add, softmax, matmul""",
    )


def test_other_products(mesh):
    assert_golden(
        folded(mesh, "einsum", "one_key_head", "channels_first"),
        """\
einsum:
  + plain_attention = plain_attention(l_q_, l_k_, l_v_, scale=0.5)
  + permute = permute(plain_attention, (0, 2, 1, 3))
  ~ transpose_3: einsum_1 -> permute
  - transpose, transpose, transpose, einsum, mul, clone, softmax, einsum
one_key_head:
  + unsqueeze = unsqueeze(getitem, 1)
  + unsqueeze_1 = unsqueeze(getitem_1, 1)
  + unsqueeze_2 = unsqueeze(invert, 0)
  + unsqueeze_3 = unsqueeze(unsqueeze_2, 1)
  + to = to(unsqueeze_3, torch.float32)
  + mul = mul(to, -8.50706e+37)
  + plain_attention = plain_attention(l_q_, unsqueeze, unsqueeze_1, scale=1,
      attn_mask=mul)
  ~ return: einsum_1 -> plain_attention
  - einsum, masked_fill, softmax, einsum
channels_first:
  + plain_attention = plain_attention(l_q_, l_k_, l_v_, scale=0.5)
  + permute = permute(plain_attention, (0, 1, 3, 2))
  ~ mT: l_q_ -> permute
  ~ return: mT_2 -> mT
  - matmul, mul, softmax, mT, matmul, mT""",
    )


def test_what_is_done_to_scores(mesh):
    assert_golden(
        folded(mesh, "softcapped", "with_sinks", "relative"),
        """\
softcapped:
  + unsqueeze = unsqueeze(invert, 0)
  + unsqueeze_1 = unsqueeze(unsqueeze, 1)
  + to_1 = to(unsqueeze_1, torch.float32)
  + mul_2 = mul(to_1, -8.50706e+37)
  + plain_attention = plain_attention(l_q_, l_k_, l_v_, scale=0.5, softcap=2,
      attn_mask=mul_2)
  ~ return: matmul_1 -> plain_attention
  - transpose, matmul, mul, truediv, tanh, mul, masked_fill, softmax, to, matmul
with_sinks:
  + unsqueeze = unsqueeze(invert, 0)
  + unsqueeze_1 = unsqueeze(unsqueeze, 1)
  + to = to(unsqueeze_1, torch.float32)
  + mul_1 = mul(to, -8.50706e+37)
  + plain_attention = plain_attention(l_q_, l_k_, l_v_, scale=0.5, sinks=l_sinks_,
      attn_mask=mul_1)
  ~ return: matmul_1 -> plain_attention
  - transpose, matmul, mul, masked_fill, cat, max, sub, softmax, getitem, dropout,
      matmul
relative:
  + plain_attention = plain_attention(l_q_, l_k_, l_v_, scale=1, attn_mask=add_1)
  ~ return: matmul_1 -> plain_attention
  - transpose, matmul, iadd, softmax, type_as, matmul""",
    )


def test_upcast_queries_and_keys(mesh):
    """In bfloat16: values are upcast too, and the result is not."""
    assert_golden(
        folded(mesh, "upcast_by_hand", dtype=torch.bfloat16),
        """\
upcast_by_hand:
  + to_3 = to(l_v_, torch.float32)
  + plain_attention = plain_attention(to, to_1, to_3, scale=0.5)
  + to_4 = to(plain_attention, torch.bfloat16)
  ~ return: matmul_1 -> to_4
  - transpose, matmul, truediv, softmax, to, matmul""",
    )


@pytest.mark.parametrize("trained", [False, True])
def test_the_same_for_all_keys(mesh, trained):
    """It changes no softmax, and is left out unless it gets a gradient, of zeros."""

    def attention(q, k, v):
        return torch.softmax(q @ k.mT + bias, -1) @ v

    bias = torch.nn.Parameter(torch.randn(6, 1), requires_grad=trained)
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind()
    found = capture(attention, q, k, v, mesh=mesh, shard=QKV)
    call = found["fold_attention_patterns"].after
    assert ("attn_mask" in call) == trained


def test_there_are_no_others():
    """A version of torch that knows more of them names what to read next."""
    assert numbers_of_torch() == {*TABLE}


@pytest.mark.parametrize("number", TABLE, ids=str)
def test_they_are_folded(mesh, number):
    """With the dropout that they have, and the input of the sequence is inferred."""
    p = 0.125 if "dropout_p" in inspect.signature(pattern(number)).parameters else 0.0
    model = TorchForm(number, p).to(TABLE[number].dtype or torch.float32)
    tokens = torch.arange(32).reshape(2, 16) % 37
    found = capture(model, tokens, mesh=mesh, strategy="auto")
    assert found.error is None
    assert (
        found["fold_attention_patterns"].rewrites == len(found.ctx.findings.plans) == 1
    )
    (call,) = found.ctx.findings.calls
    assert call.dropout_p == p
    assert [x.dim for x in found.ctx.inputs.values() if x.inferred] == [1]
    assert not found.ctx.findings.unmatched_attention


def folds(model, *inputs, mesh, **options):
    found = capture(model, *inputs, mesh=mesh, until="insert_attention", **options)
    assert not found.ctx.findings.unmatched_attention
    return found["fold_attention_patterns"].rewrites


@pytest.mark.parametrize("name", ASKING)
def test_queries_that_are_no_tokens(mesh, name):
    assert folds(Asking(ASKING[name]), torch.randn(2, 16, WIDTH), mesh=mesh) == 1


@pytest.mark.parametrize("named", [True, False])
def test_tokens_that_begin_beside_a_sharded_input(mesh, named):
    inputs = torch.zeros(2, 16, dtype=torch.long), torch.randn(2, 3, 16, 16)
    options = {"shard": {"ids": 1}} if named else {}
    assert folds(Captions(), *inputs, mesh=mesh, **options) == 1


@pytest.mark.parametrize("named", [True, False])
def test_tokens_of_rows_that_are_sharded(mesh, named):
    options = {"shard": {"image": 2}} if named else {}
    assert folds(RowsFlattened(), torch.randn(2, 3, 32, 16), mesh=mesh, **options) == 1


def test_a_twin_within_rows_stays(mesh):
    found = capture(Rows(), torch.randn(2, 8, 8, WIDTH), mesh=mesh, shard={"x": 1})
    assert found["fold_attention_patterns"].rewrites == 0
    assert len(found.ctx.findings.unmatched_attention) == 1


LENGTHS = (17, 24, 33)


def with_dropout(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.25)


def flex(q, k, v):
    """A window, without a block mask, which would be of one length."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx - kv_idx < 5, score, -torch.inf)

    return flex_attention(q, k, v, score_mod=score_mod)


def flex_and_lse(q, k, v):
    out, lse = flex_attention(q, k, v, return_lse=True)
    return out * lse.unsqueeze(-1).sigmoid()


NAMES = ("softcapped", "with_sinks", "alibi")
OWN = {form.__name__: form for form in (with_dropout, flex, flex_and_lse)}
CALLED = OWN | {name: FORMS[name] for name in NAMES}


@pytest.mark.parametrize("name", CALLED)
def test_every_length_is_shared_out(name):
    """The second graph may have a symbol for the length, or every length its graph."""
    with fake_mesh(2) as mesh, gradients_on_cpu():
        options = {"mesh": mesh, "inner": "aot_eager"}
        compiled = torch.compile(Model(CALLED[name]), backend="cp", options=options)
        for length in LENGTHS:
            tokens = torch.zeros(2, length, dtype=torch.long)
            with recording() as reports:
                logits = compiled(tokens)
                logits.square().mean().backward()
            assert logits.shape == (2, length, 37)
            (report,) = reports
            assert [call.plan is not None for call in report.calls] == [True] * 2
            assert [x.name for x in report.inputs] == ["tokens"]
            assert not report.by_hand
