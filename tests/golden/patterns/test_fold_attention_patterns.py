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
from tests.golden.golden_text import assert_golden, lines_with, table
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


def folded(mesh, name, dtype=torch.float32):
    """What the pass makes of the form: nothing that reads the scores is left."""
    form = FORMS[name]
    more = {"sinks": torch.randn(4), "table": torch.randn(16, 4)}
    given = form.__code__.co_varnames[3 : form.__code__.co_argcount]
    inputs = (*torch.randn(3, 2, 4, 6, 8, dtype=dtype), *(more[x] for x in given))
    found = capture(
        form, *inputs, mesh=mesh, shard=QKV, until="fold_attention_patterns"
    )
    step = found["fold_attention_patterns"]
    assert step.rewrites == 1, found.error
    assert not lines_with(step.after, "softmax(", "matmul(", "bmm(", "einsum(")
    return changes(step)


GOLDEN = ("filled", "filled_low", "chosen_tensor", "in_place", "of_the_shape", "alibi")
GOLDEN += ("low_then_added", "einsum", "one_key_head", "channels_first", "softcapped")
GOLDEN += ("with_sinks", "relative")


def test_the_call(mesh):
    """What the masks and biases are is compared as numbers, in tests/cpu/patterns."""
    calls = {name: lines_with(folded(mesh, name), "+ plain_att") for name in GOLDEN}
    assert_golden(
        table({name: x.partition(" = ")[2] for name, x in calls.items()}),
        """\
filled: plain_attention(l_q_, l_k_, l_v_, scale=0.353553, attn_mask=logical_not)
filled_low: plain_attention(l_q_, l_k_, l_v_, scale=0.5, attn_mask=mul)
chosen_tensor: plain_attention(l_q_, l_k_, l_v_, scale=1, attn_mask=mul)
in_place: plain_attention(l_q_, l_k_, l_v_, scale=0.5, attn_mask=masked_fill)
of_the_shape: plain_attention(l_q_, l_k_, l_v_, scale=1, attn_mask=masked_fill_1)
alibi: plain_attention(unflatten, unflatten_1, unflatten_2, scale=0.5,
    attn_mask=masked_fill_1)
low_then_added: plain_attention(l_q_, l_k_, l_v_, scale=0.5, attn_mask=add_1)
einsum: plain_attention(l_q_, l_k_, l_v_, scale=0.5)
one_key_head: plain_attention(l_q_, unsqueeze, unsqueeze_1, scale=1, attn_mask=mul)
channels_first: plain_attention(l_q_, l_k_, l_v_, scale=0.5)
softcapped: plain_attention(l_q_, l_k_, l_v_, scale=0.5, softcap=2, attn_mask=mul_2)
with_sinks: plain_attention(l_q_, l_k_, l_v_, scale=0.5, sinks=l_sinks_,
    attn_mask=mul_1)
relative: plain_attention(l_q_, l_k_, l_v_, scale=1, attn_mask=add_1)""",
    )


def test_upcast_queries_and_keys(mesh):
    """In bfloat16: values are upcast too, and the result is not."""
    assert_golden(
        folded(mesh, "upcast_by_hand", dtype=torch.bfloat16),
        """\
+ to_3 = to(l_v_, torch.float32)
+ plain_attention = plain_attention(to, to_1, to_3, scale=0.5)
+ to_4 = to(plain_attention, torch.bfloat16)
~ return: matmul_1 -> to_4
- transpose, matmul, truediv, softmax, to, matmul""",
    )


def test_a_learned_factor_of_more_digits(mesh):
    """In float32, of scores in bfloat16: queries are scaled, and keep their dtype."""

    def attention(q, k, v, factor):
        with torch.autocast("cpu", torch.bfloat16):
            return ((q @ k.mT) * factor[:, None, None]).softmax(-1) @ v

    q, k, v = torch.randn(3, 2, 4, 6, 8, dtype=torch.bfloat16)
    found = capture(attention, q, k, v, torch.randn(4), mesh=mesh, shard=QKV)
    text = found["fold_attention_patterns"].after
    assert "to = to(mul_1, torch.bfloat16)" in text
    assert "plain_attention(to, l_k_, l_v_, scale=1)" in text


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
    """Or of rows that are sharded."""
    inputs = torch.zeros(2, 16, dtype=torch.long), torch.randn(2, 3, 16, 16)
    ids, image = ({"shard": {"ids": 1}}, {"shard": {"image": 2}}) if named else ({}, {})
    assert folds(Captions(), *inputs, mesh=mesh, **ids) == 1
    assert folds(RowsFlattened(), torch.randn(2, 3, 32, 16), mesh=mesh, **image) == 1


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


def weighted_keys(q, k, v):
    """What it captures has a size in its text: every length has a graph of its own."""
    weight = v.square().mean((1, 3))

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * weight[b, kv_idx]

    return flex_attention(q, k, v, score_mod=score_mod)


NAMES = ("softcapped", "with_sinks", "alibi")
OWN = (with_dropout, flex, flex_and_lse, weighted_keys)
OWN = {form.__name__: form for form in OWN}
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
