"""Repeated keys and values are folded where the order of the heads is proved."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.golden.capture import capture, changes
from tests.golden.golden_text import assert_golden
from tests.golden.repeated_heads import BGSD, FORMS, KEPT, B, D, G, H, N, S
from tests.golden.rewritten_calls import check_equal, rewrite

sdpa = F.scaled_dot_product_attention


def inputs_of(k_shape, v_shape):
    torch.manual_seed(0)
    shapes = ((B, H, S, D), k_shape, v_shape)
    return [torch.randn(x, dtype=torch.float64, requires_grad=True) for x in shapes]


def folded(attend, shapes, count):
    """What the passes make of it, checked to fold so often and to compute the same."""
    if isinstance(shapes[0], torch.Tensor):
        inputs = shapes
    else:
        inputs = [torch.randn(x, dtype=torch.float64) for x in shapes]
    got = rewrite(attend, *inputs)
    assert got.counts["fold_kv_repeat"] == count
    check_equal(got, attend, *inputs)
    return got


def attention_of(repeat_k, repeat_v):
    def attend(q, k, v):
        return sdpa(q, repeat_k(k), repeat_v(v), is_causal=True)

    return attend


@pytest.mark.parametrize("form", FORMS)
def test_forms_that_are_folded(form):
    shape, repeat = FORMS[form]
    attend, inputs = attention_of(repeat, repeat), inputs_of(shape, shape)
    got = rewrite(attend, *inputs)
    assert got.counts["fold_kv_repeat"] == 1
    (call,) = got.calls
    assert call.k_shape == (B, H // call_copies(form), S, D)
    assert "expand" not in got.texts["fold_kv_repeat"]
    assert "repeat" not in got.texts["fold_kv_repeat"]
    check_equal(got, attend, *inputs)


def call_copies(form):
    """How often the form repeats a head."""
    return H if "one_head" in form or "no_head" in form or "twice" in form else N


@pytest.mark.parametrize("form", KEPT)
def test_forms_that_are_kept(form):
    shape, repeat = KEPT[form]
    attend, inputs = attention_of(repeat, repeat), inputs_of(shape, shape)
    got = rewrite(attend, *inputs)
    assert got.counts["find_attention"] == 1 and got.counts["fold_kv_repeat"] == 0
    assert got.texts["fold_kv_repeat"] == got.texts[""]
    assert got.calls[0].k_shape == (B, H, S, D)
    check_equal(got, attend, *inputs)


@pytest.mark.parametrize("k_form", FORMS)
@pytest.mark.parametrize("v_form", ["hf", "before_transpose", "one_head", "tiled"])
def test_keys_and_values_each_have_their_form(k_form, v_form):
    """Folded only if both are repeated as often."""
    (k_shape, repeat_k), (v_shape, repeat_v) = FORMS[k_form], (FORMS | KEPT)[v_form]
    attend, inputs = attention_of(repeat_k, repeat_v), inputs_of(k_shape, v_shape)
    got = rewrite(attend, *inputs)
    alike = call_copies(k_form) == call_copies(v_form) and v_form != "tiled"
    assert got.counts["fold_kv_repeat"] == alike
    check_equal(got, attend, *inputs)


def test_sizes_that_are_equal_are_not_mixed_up():
    """All sizes are 2: the order is followed, not guessed from sizes."""

    def hf(k):
        return k[:, :, None].expand(2, 2, 2, 2, 2).reshape(2, 4, 2, 2)

    def mixed_up(k):
        return k[:, :, :, None].expand(2, 2, 2, 2, 2).reshape(2, 4, 2, 2)

    for repeat, count in ((hf, 1), (mixed_up, 0)):
        shapes = ((2, 4, 2, 2), (2, 2, 2, 2), (2, 2, 2, 2))
        folded(attention_of(repeat, repeat), shapes, count)


def regrouped(k, order):
    """[1, 12, S, D]: each head twice, then all of them as 2 x 3 x 2 reordered."""
    k = k.unflatten(1, (2, 3, 2)).flatten(1, 3).repeat_interleave(2, 1)
    dims = (0, *(1 + i for i in order), 4, 5, 6)
    return k.unflatten(1, (2, 3, 2, 2)).permute(dims).flatten(1, 4)


@pytest.mark.parametrize(
    ("order", "count"),
    [((0, 1, 2), 1), ((1, 0, 2), 0), ((0, 2, 1), 0), ((2, 1, 0), 0), ((2, 0, 1), 0)],
)
def test_heads_in_another_order_are_kept(order, count):
    attend = attention_of(lambda k: regrouped(k, order), lambda v: regrouped(v, order))
    shapes = ((1, 24, S, D), (1, 12, S, D), (1, 12, S, D))
    folded(attend, shapes, count)


def test_what_is_tiled_first_stays_tiled():
    """Only the copies that are innermost are folded."""

    def repeat(k):
        return k.repeat(1, 3, 1, 1).repeat_interleave(2, 1)

    attend = attention_of(repeat, repeat)
    shapes = ((B, 12, S, D), (B, 2, S, D), (B, 2, S, D))
    got = folded(attend, shapes, 1)
    assert got.calls[0].k_shape[1] == 6
    assert ".repeat(l_k_, 1, 3, 1, 1)" in got.texts["fold_kv_repeat"]


def test_a_batch_and_tokens_of_one():
    def repeat(k):
        return k[:, :, None].expand(1, G, N, 1, D).reshape(1, H, 1, D)

    attend = attention_of(repeat, repeat)
    shapes = ((1, H, 1, D), (1, G, 1, D), (1, G, 1, D))
    folded(attend, shapes, 1)


def test_what_else_reads_the_copies_keeps_them():
    def attend(q, k, v):
        k = FORMS["hf"][1](k)
        return sdpa(q, k, k), sdpa(q, k, v), k.sum()

    # v of the second call is not repeated
    got = folded(attend, inputs_of(BGSD, (B, H, S, D)), 1)
    assert "expand" in got.texts["fold_kv_repeat"]


def test_heads_that_are_grouped_already_are_folded_further():
    def attend(q, k, v):
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return sdpa(q, k, v, enable_gqa=True)

    shapes = ((B, 12, S, D), (B, 3, S, D), (B, 3, S, D))
    assert folded(attend, shapes, 1).calls[0].k_shape[1] == 3


def test_keywords_and_the_overload_of_aten():
    def attend(q, k, v):
        k, v = k.repeat_interleave(N, 1), v.repeat_interleave(N, 1)
        first = sdpa(value=v, key=k, query=q, scale=0.5)
        return first, torch.ops.aten.scaled_dot_product_attention.default(q, k, v)

    folded(attend, inputs_of(BGSD, BGSD), 2)


def test_a_call_that_is_not_rewritten_stays():
    """It runs as the model wrote it."""

    def attend(q, k, v):
        k, v = k.repeat_interleave(N, 1), v.repeat_interleave(N, 1)
        return sdpa(q, k, v, dropout_p=1.0)

    got = rewrite(attend, *inputs_of(BGSD, BGSD))
    assert got.calls[0].unsupported is not None
    assert got.counts["fold_kv_repeat"] == 0


def repeated(q, k, v):
    k = k[:, :, None, :, :].expand(2, 2, 2, 16, 8).reshape(2, 4, 16, 8)
    v = v.transpose(1, 2).repeat_interleave(2, 2).transpose(1, 2)
    return sdpa(q, k, v, is_causal=True)


def grouped_inputs(**given):
    return [torch.randn(2, heads, 16, 8, **given) for heads in (4, 2, 2)]


def test_the_graph_before_and_after(mesh):
    captured = capture(repeated, *grouped_inputs(), mesh=mesh, shard={"q": 2, "k": 2})
    step = captured["fold_kv_repeat"]
    assert step.rewrites == 1
    assert_golden(
        changes(step),
        """\
~ scaled_dot_product_attention: (l_q_, k, v, is_causal=True) ->
    (l_q_, l_k_, l_v_, is_causal=True, enable_gqa=True)
- getitem, expand, reshape, transpose, repeat_interleave, transpose""",
    )
    assert "cp.ring_attention(cp_shard_1, cp_shard, cp_replicate, " in captured.text


def test_checkpoint_region(mesh):
    """Keys that are repeated inside are folded, those that come in repeated are not."""

    def attend(q, k, v):
        inside = checkpoint(repeated, q, k, v, use_reentrant=False)
        copies = (x.repeat_interleave(2, 1) for x in (k, v))
        return inside + checkpoint(sdpa, q, *copies, use_reentrant=False)

    inputs = grouped_inputs(requires_grad=True)
    captured = capture(attend, *inputs, mesh=mesh, shard={"q": 2, "k": 2, "v": 2})
    assert captured["fold_kv_repeat"].rewrites == 1
    assert [call.k_shape[1] for call in captured.ctx.findings.calls] == [2, 4]


def test_a_symbolic_length():
    """No reshape has a number for the length."""

    def attend(q, k, v):
        (b, g, s, d), n = k.shape, q.shape[1] // k.shape[1]
        k, v = (
            x[:, :, None].expand(b, g, n, s, d).reshape(b, g * n, s, d) for x in (k, v)
        )
        return sdpa(q, k, v, is_causal=True)

    inputs = inputs_of(BGSD, BGSD)
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 2)
    got = rewrite(attend, *inputs, dynamic=None)
    assert got.counts["fold_kv_repeat"] == 1
    check_equal(got, attend, *inputs)
