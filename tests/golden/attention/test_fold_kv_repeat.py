"""Repeated keys and values are folded where the order of the heads is proved."""
# ruff: noqa: E501  one form a line

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.golden.capture import capture, changes
from tests.golden.golden_text import assert_golden, lines_with
from tests.golden.rewritten_calls import check_equal, rewrite

B, G, N, S, D = 2, 2, 3, 5, 4  # batch, key heads, copies, tokens, head dim
H = G * N

BGSD, BSGD = (B, G, S, D), (B, S, G, D)

# What a model does to the keys [B, G, S, D] or [B, S, G, D] that it has.
FORMS = {
    "hf": (BGSD, lambda k: k[:, :, None, :, :].expand(B, G, N, S, D).reshape(B, H, S, D)),
    "short_index": (BGSD, lambda k: k[:, :, None].expand(-1, -1, N, -1, -1).flatten(1, 2)),
    "ellipsis": (BGSD, lambda k: k[..., None, :, :].expand(B, G, N, S, D).reshape(B, -1, S, D)),
    "contiguous_view": (BGSD, lambda k: k.unsqueeze(2).expand(B, G, N, S, D).contiguous().view(B, H, S, D)),
    "functions": (BGSD, lambda k: torch.flatten(torch.broadcast_to(torch.unsqueeze(k, 2), (B, G, N, S, D)), 1, 2)),
    "interleave": (BGSD, lambda k: k.repeat_interleave(N, 1)),
    "interleave_function": (BGSD, lambda k: torch.repeat_interleave(k, N, dim=-3)),
    "interleave_keywords": (BGSD, lambda k: torch.repeat_interleave(k, repeats=N, dim=1)),
    "interleave_twice": ((B, 1, S, D), lambda k: k.repeat_interleave(3, 1).repeat_interleave(2, 1)),
    "repeat_new_dim": (BGSD, lambda k: k.unsqueeze(2).repeat(1, 1, N, 1, 1).reshape(B, H, S, D)),
    "tile_new_dim": (BGSD, lambda k: torch.tile(k.unsqueeze(2), (N, 1, 1)).flatten(1, 2)),
    "unflatten": (BGSD, lambda k: k.unflatten(1, (G, 1)).expand(B, G, N, S, D).flatten(1, 2)),
    "before_transpose": (BSGD, lambda k: k.unsqueeze(3).expand(B, S, G, N, D).reshape(B, S, H, D).transpose(1, 2)),
    "interleave_before_transpose": (BSGD, lambda k: k.repeat_interleave(N, dim=2).transpose(1, 2).contiguous()),
    "after_permute": (BSGD, lambda k: k.permute(0, 2, 1, 3).repeat_interleave(N, 1).to(k.dtype)),
    "movedim": (BSGD, lambda k: torch.movedim(k.repeat_interleave(N, 2), 2, 1).clone()),
    "five_dims": ((B, S, G * D), lambda k: k.view(B, S, G, 1, D).expand(B, S, G, N, D).reshape(B, S, H, D).permute(0, 2, 1, 3)),
    "one_head": ((B, 1, S, D), lambda k: k.expand(-1, H, -1, -1)),
    "one_head_repeat": ((B, 1, S, D), lambda k: k.repeat(1, H, 1, 1)),
    "one_head_before_transpose": ((B, S, 1, D), lambda k: k.expand(B, S, H, D).transpose(1, 2)),
    "no_head": ((B, S, D), lambda k: k.unsqueeze(1).expand(B, H, S, D)),
    "no_head_before_transpose": ((B, S, D), lambda k: k[:, :, None].repeat(1, 1, H, 1).swapaxes(1, 2)),
}  # fmt: skip


def in_no_grad(k):
    with torch.no_grad():
        return k.repeat_interleave(N, 1)


def written(k):
    repeated = k.repeat_interleave(N, 1)
    repeated[:, 0].mul_(2.0)
    return repeated


def written_at_the_beginning(k):
    k = k + 1.0
    repeated = k.repeat_interleave(N, 1)
    k.mul_(2.0)
    return repeated


def written_through_a_view(k):
    k = k + 1.0
    repeated = k.transpose(1, 2).repeat_interleave(N, 2).transpose(1, 2)
    k.flatten(2)[0] = 3.0
    return repeated


# The twins: other orders of the heads, other elements, other gradients.
KEPT = {
    "tiled": (BGSD, lambda k: k.repeat(1, N, 1, 1)),
    "concatenated": (BGSD, lambda k: torch.cat([k] * N, 1)),
    "expanded_outside": (BGSD, lambda k: k.unsqueeze(1).expand(B, N, G, S, D).reshape(B, H, S, D)),
    "half_tiled": (BGSD, lambda k: k.repeat(1, N, 1, 1).repeat_interleave(1, 1)),
    "tiled_and_interleaved": ((B, G, S, D), lambda k: k[:, :, None].expand(B, G, N, S, D).transpose(1, 2).reshape(B, H, S, D)),
    "mixed_up": (BSGD, lambda k: k.unsqueeze(3).expand(B, S, G, N, D).reshape(B, H, S, D)),
    "rows_between": (BGSD, lambda k: k.unsqueeze(3).expand(B, G, S, N, D).reshape(B, H, S, D)),
    "scaled": (BGSD, lambda k: k.repeat_interleave(N, 1) * 1.5),
    "detached": (BGSD, lambda k: k.repeat_interleave(N, 1).detach()),
    "without_gradient": (BGSD, in_no_grad),
    "unequally_often": (BGSD, lambda k: k.repeat_interleave(torch.tensor([2, 4]), 1, output_size=H)),
    "a_part": ((B, G, S + 1, D), lambda k: k.repeat_interleave(N, 1)[:, :, 1:]),
    "reversed": (BGSD, lambda k: k.repeat_interleave(N, 1).flip(1)),
    "rounded": (BGSD, lambda k: k.repeat_interleave(N, 1).to(torch.float32).to(k.dtype)),
    "other_heads": (BGSD, lambda k: k.repeat_interleave(N, 1)[:, [5, 4, 3, 2, 1, 0]]),
    "not_repeated": ((B, H, S, D), lambda k: k.transpose(1, 2).transpose(1, 2)),
    "written": (BGSD, written),
    "written_at_the_beginning": (BGSD, written_at_the_beginning),
    "written_through_a_view": (BGSD, written_through_a_view),
}  # fmt: skip
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
    if alike:  # as every form is to one of them
        assert got.calls[0].k_shape == (B, H // call_copies(k_form), S, D)
        assert not lines_with(got.texts["fold_kv_repeat"], "expand", "repeat")
    check_equal(got, attend, *inputs)


def regrouped(*order):
    """[1, 12, S, D]: each head twice, then all of them as 2 x 3 x 2 reordered."""

    def repeat(k):
        k = k.unflatten(1, (2, 3, 2)).flatten(1, 3).repeat_interleave(2, 1)
        dims = (0, *(1 + i for i in order), 4, 5, 6)
        return k.unflatten(1, (2, 3, 2, 2)).permute(dims).flatten(1, 4)

    return repeat


# Heads of the queries and of what is left of the keys, the shape of the keys given.
ORDERS = {
    "all sizes are 2": (4, 2, (2, 2, 2, 2), lambda k: k[:, :, None].expand(2, 2, 2, 2, 2).reshape(2, 4, 2, 2)),
    "and mixed up": (4, 4, (2, 2, 2, 2), lambda k: k[:, :, :, None].expand(2, 2, 2, 2, 2).reshape(2, 4, 2, 2)),
    "in order": (24, 12, (1, 12, S, D), regrouped(0, 1, 2)),
    "first two": (24, 24, (1, 12, S, D), regrouped(1, 0, 2)),
    "last two": (24, 24, (1, 12, S, D), regrouped(0, 2, 1)),
    "reversed": (24, 24, (1, 12, S, D), regrouped(2, 1, 0)),
    "rotated": (24, 24, (1, 12, S, D), regrouped(2, 0, 1)),
    # Only the copies that are innermost are folded.
    "tiled first": (12, 6, (B, 2, S, D), lambda k: k.repeat(1, 3, 1, 1).repeat_interleave(2, 1)),
    "a batch and tokens of one": (H, G, (1, G, 1, D), lambda k: k[:, :, None].expand(1, G, N, 1, D).reshape(1, H, 1, D)),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_the_order_is_followed_and_not_guessed_from_sizes(name):
    heads, left, shape, repeat = ORDERS[name]
    shapes = ((shape[0], heads, *shape[2:]), shape, shape)
    got = folded(attention_of(repeat, repeat), shapes, left != heads)
    assert got.calls[0].k_shape[1] == left


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
    assert "cp.ring_attention(l_q_, l_k_, l_v_, " in captured.text


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
