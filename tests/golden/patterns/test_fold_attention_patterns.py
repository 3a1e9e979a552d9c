"""Attention that models write out becomes one call; what looks alike stays."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.golden.capture import capture, changes, fake_group
from tests.golden.golden_text import assert_golden, bare_calls
from tests.support.forms.attention_pattern_forms import FORMS

SHARD = {"shard": {"q": 2, "k": 2, "v": 2}}


@pytest.fixture
def mesh():
    """Rank 1 of 2."""
    with fake_group(ranks=2):
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))


def folded(name, mesh):
    """What the pass makes of a form, without the lines of its mask that stay."""
    form = FORMS[name]
    more = {"sinks": torch.randn(4), "table": torch.randn(16, 4)}
    given = form.__code__.co_varnames[3 : form.__code__.co_argcount]
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind()
    found = capture(form, q, k, v, *(more[x] for x in given), mesh=mesh, **SHARD)
    step = found["fold_attention_patterns"]
    assert step.rewrites == 1, found.error
    return bare_calls(changes(step))


def test_filled(mesh):
    assert_golden(
        folded("filled", mesh),
        """\
- transpose = .transpose(l_k_, -2, -1)
- matmul = matmul(l_q_, transpose)
- scores = mul(matmul, 0.353553)
+ logical_not = logical_not(eq)
+ plain_attention = plain_attention(l_q_, l_k_, l_v_, scale=0.353553,
    attn_mask=logical_not)
+ return (plain_attention,)
- scores_1 = .masked_fill(scores, eq, -inf)
- softmax = softmax(scores_1, dim=-1)
- matmul_1 = matmul(softmax, l_v_)
- return (matmul_1,)""",
    )


def test_filled_low(mesh):
    assert_golden(
        folded("filled_low", mesh),
        """\
+ unsqueeze = unsqueeze(hidden, 0)
+ unsqueeze_1 = unsqueeze(unsqueeze, 1)
+ to = to(unsqueeze_1, torch.float32)
+ mul = mul(to, -8.50706e+37)
+ plain_attention = plain_attention(l_q_, l_k_, l_v_, scale=0.5, attn_mask=mul)
+ return (plain_attention,)
- mT = mT(l_k_)
- matmul = matmul(l_q_, mT)
- truediv = truediv(matmul, 2)
- masked_fill = .masked_fill(truediv, hidden, -1e+09)
- softmax = .softmax(masked_fill, -1)
- matmul_1 = matmul(softmax, l_v_)
- return (matmul_1,)""",
    )


def test_a_low_number_that_is_a_tensor(mesh):
    assert_golden(
        folded("chosen_tensor", mesh),
        """\
- transpose = .transpose(l_k_, -1, -2)
- scores = matmul(l_q_, transpose)
- where = where(tril, scores, value)
- softmax = .softmax(where, -1)
- matmul_1 = matmul(softmax, l_v_)
- return (matmul_1,)
+ unsqueeze = unsqueeze(tril, 0)
+ unsqueeze_1 = unsqueeze(unsqueeze, 1)
+ logical_not = logical_not(unsqueeze_1)
+ to = to(logical_not, torch.float32)
+ mul = mul(to, -8.50706e+37)
+ plain_attention = plain_attention(l_q_, l_k_, l_v_, scale=1, attn_mask=mul)
+ return (plain_attention,)""",
    )


def test_in_place(mesh):
    assert_golden(
        folded("in_place", mesh),
        """\
- mT = mT(l_k_)
- scores = matmul(l_q_, mT)
- scores_1 = imul(scores, 0.5)
- scores_2 = iadd(scores_1, arange)
- masked_fill_ = .masked_fill_(scores_2, invert, -inf)
- softmax = .softmax(scores_2, -1)
- matmul_1 = matmul(softmax, l_v_)
- return (matmul_1,)
+ unsqueeze = unsqueeze(arange, 0)
+ unsqueeze_1 = unsqueeze(unsqueeze, 1)
+ unsqueeze_2 = unsqueeze(unsqueeze_1, 2)
+ unsqueeze_3 = unsqueeze(invert, 0)
+ unsqueeze_4 = unsqueeze(unsqueeze_3, 1)
+ expand = expand(unsqueeze_2, 1, 1, 6, 6)
+ masked_fill = masked_fill(expand, unsqueeze_4, -inf)
+ plain_attention = plain_attention(l_q_, l_k_, l_v_, scale=0.5, attn_mask=masked_fill)
+ return (plain_attention,)""",
    )


def test_alibi(mesh):
    assert_golden(
        folded("alibi", mesh),
        """\
- transpose = .transpose(reshape_1, 1, 2)
- scores = .baddbmm(reshape, heads, transpose, beta=1, alpha=0.5)
- view = .view(scores, 2, 4, 6, 6)
- scores_1 = .masked_fill(view, invert, -3.40282e+38)
- softmax = softmax(scores_1, dim=-1, dtype=torch.float32)
- weights = .to(softmax, torch.float32)
- view_1 = .view(weights, 8, 6, 6)
- bmm = bmm(view_1, flatten_1)
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
- view_2 = .view(bmm, 2, 4, 6, 8)
+ view_2 = .view(flatten_2, 2, 4, 6, 8)""",
    )


def test_einsum(mesh):
    assert_golden(
        folded("einsum", mesh),
        """\
+ plain_attention = plain_attention(l_q_, l_k_, l_v_, scale=0.5)
+ permute = permute(plain_attention, (0, 2, 1, 3))
- q = .transpose(l_q_, 1, 2)
- k = .transpose(l_k_, 1, 2)
- v = .transpose(l_v_, 1, 2)
- einsum = einsum('bihd,bjhd->bhij', q, k)
- scores = mul(einsum, 0.5)
- clone = .clone(scores)
- weights = .softmax(scores, dim=-1)
- einsum_1 = einsum('bhij,bjhd->bihd', weights, v)
- transpose_3 = .transpose(einsum_1, 1, 2)
+ transpose_3 = .transpose(permute, 1, 2)""",
    )


def test_one_key_head(mesh):
    assert_golden(
        folded("one_key_head", mesh),
        """\
- scores = einsum('b h i d, b j d -> b h i j', l_q_, getitem)
- scores_1 = .masked_fill(scores, invert, -3.40282e+38)
- softmax = .softmax(scores_1, -1)
- einsum_1 = einsum('bhij,bjd->bhid', softmax, getitem_1)
- return (einsum_1,)
+ unsqueeze = unsqueeze(getitem, 1)
+ unsqueeze_1 = unsqueeze(getitem_1, 1)
+ unsqueeze_2 = unsqueeze(invert, 0)
+ unsqueeze_3 = unsqueeze(unsqueeze_2, 1)
+ to = to(unsqueeze_3, torch.float32)
+ mul = mul(to, -8.50706e+37)
+ plain_attention = plain_attention(l_q_, unsqueeze, unsqueeze_1, scale=1,
    attn_mask=mul)
+ return (plain_attention,)""",
    )


def test_channels_first(mesh):
    assert_golden(
        folded("channels_first", mesh),
        """\
+ plain_attention = plain_attention(l_q_, l_k_, l_v_, scale=0.5)
+ permute = permute(plain_attention, (0, 1, 3, 2))
+ mT = mT(permute)
- mT = mT(l_q_)
- matmul = matmul(l_k_, mT)
- mul = mul(matmul, 0.5)
- weights = softmax(mul, dim=2)
- mT_1 = mT(l_v_)
- matmul_1 = matmul(mT_1, weights)
- mT_2 = mT(matmul_1)
- return (mT_2,)
+ return (mT,)""",
    )


def test_softcapped(mesh):
    assert_golden(
        folded("softcapped", mesh),
        """\
- transpose = .transpose(l_k_, 2, 3)
- matmul = matmul(l_q_, transpose)
- scores = mul(matmul, 0.5)
- truediv = truediv(scores, 2)
- scores_1 = tanh(truediv)
- scores_2 = mul(scores_1, 2)
- scores_3 = .masked_fill(scores_2, invert, -3.40282e+38)
- softmax = softmax(scores_3, dim=-1, dtype=torch.float32)
- to = .to(softmax, torch.float32)
- matmul_1 = matmul(to, l_v_)
- return (matmul_1,)
+ unsqueeze = unsqueeze(invert, 0)
+ unsqueeze_1 = unsqueeze(unsqueeze, 1)
+ to_1 = to(unsqueeze_1, torch.float32)
+ mul_2 = mul(to_1, -8.50706e+37)
+ plain_attention = plain_attention(l_q_, l_k_, l_v_, scale=0.5, softcap=2,
    attn_mask=mul_2)
+ return (plain_attention,)""",
    )


def test_with_sinks(mesh):
    assert_golden(
        folded("with_sinks", mesh),
        """\
- transpose = .transpose(l_k_, 2, 3)
- matmul = matmul(l_q_, transpose)
- scores = mul(matmul, 0.5)
- scores_1 = .masked_fill(scores, invert, -3.40282e+38)
+ unsqueeze = unsqueeze(invert, 0)
+ unsqueeze_1 = unsqueeze(unsqueeze, 1)
+ to = to(unsqueeze_1, torch.float32)
+ mul_1 = mul(to, -8.50706e+37)
+ plain_attention = plain_attention(l_q_, l_k_, l_v_, scale=0.5, sinks=l_sinks_,
    attn_mask=mul_1)
+ return (plain_attention,)
- scores_2 = cat([scores_1, column], dim=-1)
- max_1 = .max(scores_2, dim=-1, keepdim=True)
- getitem = max_1[0]
- scores_3 = sub(scores_2, getitem)
- softmax = softmax(scores_3, dim=-1, dtype=torch.float32)
- weights = softmax[..., :-1]
- dropout = dropout(weights, p=0, training=True)
- matmul_1 = matmul(dropout, l_v_)
- return (matmul_1,)""",
    )


def test_relative(mesh):
    assert_golden(
        folded("relative", mesh),
        """\
- transpose = .transpose(l_k_, 3, 2)
- scores = matmul(l_q_, transpose)
+ plain_attention = plain_attention(l_q_, l_k_, l_v_, scale=1, attn_mask=add_1)
+ return (plain_attention,)
- scores_1 = iadd(scores, add_1)
- softmax = softmax(scores_1, dim=-1)
- type_as = .type_as(softmax, scores_1)
- matmul_1 = matmul(type_as, l_v_)
- return (matmul_1,)""",
    )


def test_upcast_queries_and_keys(mesh):
    """In bfloat16: values are upcast too, and the result is not."""
    q, k, v = torch.randn(3, 2, 4, 6, 8, dtype=torch.bfloat16).unbind()
    found = capture(
        FORMS["upcast_by_hand"],
        q,
        k,
        v,
        mesh=mesh,
        **SHARD,
        until="fold_attention_patterns",
    )
    assert_golden(
        bare_calls(changes(found["fold_attention_patterns"])),
        """\
+ to_3 = to(l_v_, torch.float32)
+ plain_attention = plain_attention(to, to_1, to_3, scale=0.5)
+ to_4 = to(plain_attention, torch.bfloat16)
- transpose = .transpose(to_1, -1, -2)
- matmul = matmul(to, transpose)
- scores = truediv(matmul, 2)
- softmax = .softmax(scores, -1)
- to_2 = .to(softmax, torch.bfloat16)
- matmul_1 = matmul(to_2, l_v_)
- return (matmul_1,)
+ return (to_4,)""",
    )


def test_low_then_added(mesh):
    assert_golden(
        folded("low_then_added", mesh),
        """\
- mT = mT(l_k_)
- matmul = matmul(l_q_, mT)
- div = .div(matmul, scale)
- where = where(seen, div, low)
- scores = add(where, padding_1)
- softmax = .softmax(scores, -1)
- matmul_1 = matmul(softmax, l_v_)
- return (matmul_1,)
+ unsqueeze = unsqueeze(seen, 0)
+ unsqueeze_1 = unsqueeze(unsqueeze, 1)
+ logical_not = logical_not(unsqueeze_1)
+ to = to(logical_not, torch.float32)
+ mul = mul(to, -8.50706e+37)
+ add_1 = add(mul, padding_1)
+ plain_attention = plain_attention(l_q_, l_k_, l_v_, scale=0.5, attn_mask=add_1)
+ return (plain_attention,)""",
    )


def test_of_the_shape(mesh):
    """Nothing that reads the scores for their shape or dtype is left."""
    assert_golden(
        folded("of_the_shape", mesh),
        """\
- mT = mT(l_k_)
- scores = matmul(l_q_, mT)
+ type_as = to(arange, torch.float32)
- type_as = .type_as(arange, scores)
- scores_1 = add(scores, type_as)
- hidden = .expand_as(view, scores_1)
- masked_fill = .masked_fill(scores_1, hidden, low)
- softmax = .softmax(masked_fill, -1)
- matmul_1 = matmul(softmax, l_v_)
- return (matmul_1,)
+ unsqueeze = unsqueeze(type_as, 0)
+ unsqueeze_1 = unsqueeze(unsqueeze, 1)
+ unsqueeze_2 = unsqueeze(unsqueeze_1, 2)
+ masked_fill_1 = masked_fill(unsqueeze_2, view, -inf)
+ plain_attention = plain_attention(l_q_, l_k_, l_v_, scale=1, attn_mask=masked_fill_1)
+ return (plain_attention,)""",
    )


@pytest.mark.parametrize("trained", [False, True])
def test_the_same_for_all_keys(mesh, trained):
    """It changes no softmax, and is left out unless it gets a gradient, of zeros."""

    def attention(q, k, v):
        return torch.softmax(q @ k.mT + bias, -1) @ v

    bias = torch.nn.Parameter(torch.randn(6, 1), requires_grad=trained)
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind()
    found = capture(attention, q, k, v, mesh=mesh, **SHARD)
    call = found["fold_attention_patterns"].after
    assert ("attn_mask" in call) == trained
