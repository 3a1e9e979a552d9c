"""nn.MultiheadAttention is opened; what is no such module stays as it is."""

import re

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import cpcompile as cp
from cpcompile.cost.plans import Direction
from tests.golden.capture import capture
from tests.golden.golden_text import (
    assert_golden,
    bare_calls,
    difference,
    lines_without,
)


class SelfAttention(nn.Module):
    def __init__(self, need_weights=False):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


def calls(text):
    """The calls that compute, without those that only rearrange, and short names."""
    moves = "view reshape transpose permute select squeeze unsqueeze contiguous"
    text = lines_without(bare_calls(text), *(f"= aten.{x}" for x in moves.split()))
    return re.sub(r"l_\w*modules_attention_(modules_)?", "", text)


def found(fn, mesh, x=None, **options):
    """Of fn(x): what the passes up to those that write attention find."""
    x = torch.randn(2, 16, 8) if x is None else x
    options = {"shard": {"x": 1}, "until": "insert_attention"} | options
    return capture(fn, x, mesh=mesh, **options)


def counts(captured):
    """Modules that are opened, and calls of attention that become operators."""
    steps = (captured[x] for x in ("inline_attention_modules", "insert_attention"))
    return tuple(step.rewrites for step in steps)


def test_multihead_attention(mesh):
    """The body is traced with global shapes, so that of sharded inputs is the same."""
    model = SelfAttention()
    plain = found(model, mesh)["inline_attention_modules"]
    assert_golden(
        difference(calls(plain.before), calls(plain.after)),
        """\
+ linear_default = aten.linear(query, parameters_in_proj_weight_,
    parameters_in_proj_bias_)
+ unflatten_int = aten.unflatten.int(linear_default, dim=-1, sizes=[3, 8])
+ scaled_dot_product_attention_default =
    aten.scaled_dot_product_attention(view_default_3, view_default_4, view_default_5)
+ linear_default_1 = aten.linear(reshape_default, out_proj_parameters_weight_,
    out_proj_parameters_bias_)
~ attn_output_1: multi_head_attention_forward[0] -> view_default_6
- multi_head_attention_forward""",
    )
    captured = capture(
        model, cp.shard(torch.randn(2, 16, 8), mesh, 1), until="insert_attention"
    )
    assert counts(captured) == (1, 1)
    assert calls(captured["inline_attention_modules"].after) == calls(plain.after)


def test_checkpoint_region(mesh):
    model = SelfAttention()

    def recomputed(x):
        return checkpoint(model, x, use_reentrant=False)

    captured = found(recomputed, mesh, torch.randn(2, 16, 8, requires_grad=True))
    assert counts(captured) == (1, 1)
    assert "    ring_attention_default = " in captured.text


def test_weights_that_are_returned_need_plain_arithmetic(mesh):
    """Opened too, but there is no attention call inside: torch computes softmax."""
    captured = found(SelfAttention(need_weights=True), mesh, until="find_attention")
    assert captured["inline_attention_modules"].rewrites == 1
    assert captured["find_attention"].rewrites == 0


MASKS = {
    "float": lambda x: {"attn_mask": torch.full((16, 16), -1.0).triu(1)},
    "bool": lambda x: {"attn_mask": torch.ones(16, 16, dtype=torch.bool).triu(1)},
    "of heads": lambda x: {"attn_mask": torch.arange(1024.0).sin().view(4, 16, 16)},
    "padding": lambda x: {"key_padding_mask": x[:, :, 0] > 3.0},
    "float padding": lambda x: {"key_padding_mask": x[:, :, 0]},
    "both": lambda x: {
        "key_padding_mask": x[:, :, 0] > 3.0,
        "attn_mask": torch.ones(16, 16, dtype=torch.bool).triu(1),
    },
}


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_is_handed_to_the_call_inside(mesh, mask):
    """As an argument that fits to the scores [batch, heads, queries, keys]."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def attend(x):
        return attention(x, x, x, need_weights=False, **MASKS[mask](x))[0]

    captured = found(attend, mesh, strict=False)
    (call,) = captured.ctx.findings.calls
    assert captured.error is None
    if call.is_causal:  # what the bool mask says
        assert mask == "bool" and call.mask is None
        return
    value = call.mask.meta["example_value"]
    assert torch.broadcast_shapes(value.shape, (2, 2, 16, 16)) == (2, 2, 16, 16)
    assert captured.ctx.findings.masks[call].text


def test_zeros_that_the_function_makes(mesh):
    attention = nn.MultiheadAttention(8, 2, batch_first=True, add_zero_attn=True)
    captured = found(lambda x: attention(x, x, x, need_weights=False)[0], mesh)
    assert captured["inline_attention_modules"].rewrites == 1
    assert captured.ctx.findings.calls[0].k_shape[-2] == 17
    assert "aten.zeros(size=[4, 1, 4]" in captured["inline_attention_modules"].after


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_layer_without_gradients(mesh, norm_first):
    """One operator of torch, which is opened as well."""
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, batch_first=True, norm_first=norm_first
    ).eval()
    with torch.no_grad():
        captured = found(lambda x: layer(x), mesh, until=None)
    before = captured["inline_attention_modules"].before
    assert "= _transformer_encoder_layer_fwd(" in before
    assert counts(captured) == (1, 1)


def test_padding_of_an_encoder_layer_without_gradients(mesh):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    hidden = torch.zeros(2, 16, dtype=torch.bool)
    with torch.no_grad():
        captured = found(
            lambda x: layer(x, src_key_padding_mask=hidden), mesh, strict=False
        )
    (call,) = captured.ctx.findings.calls
    assert call.mask.meta["example_value"].shape == (2, 1, 1, 16)


@pytest.mark.parametrize("said", [None, True, False])
def test_whether_a_mask_is_causal_is_read_from_the_graph(mesh, said):
    """torch compares its values with is_causal=None, which would break the graph."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def encode(x):
        mask = nn.Transformer.generate_square_subsequent_mask(16)
        return encoder(x, mask=mask, is_causal=said)

    captured = found(encode, mesh)
    assert [(x.is_causal, x.mask) for x in captured.ctx.findings.calls] == [
        (True, None)
    ] * 2


@pytest.mark.parametrize("width", [1, 2])
def test_a_mask_that_is_not_causal_stays_one(mesh, width):
    """The twin; a decoder looks as well."""
    layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    decoder = nn.TransformerDecoder(layer, 1)

    def decode(x):
        hidden = torch.ones(16, 16, dtype=torch.bool).triu(width)
        return decoder(x, x, tgt_mask=torch.where(hidden, -torch.inf, 0.0))

    captured = found(decode, mesh)
    first, second = captured.ctx.findings.calls
    assert first.is_causal == (width == 1)
    assert (first in captured.ctx.findings.masks) == (width == 2)
    assert not second.is_causal


def test_eager_still_looks(mesh):
    looks = nn.modules.transformer._detect_is_causal_mask
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    assert looks(mask) and not looks(mask.flip(0))


class Pool(nn.Module):
    """One query, the mean of the tokens, as attention that pools has."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x.mean(1, keepdim=True), x, x, need_weights=False)[0]


@pytest.mark.parametrize("trained", [True, False])
def test_what_is_inlined_is_trained_where_the_module_is(mesh, trained):
    """The strategy for one query, split_kv, has no gradient."""
    with torch.set_grad_enabled(trained):
        ctx = found(Pool(), mesh).ctx
    (plan,) = ctx.findings.plans.values()
    expected = Direction.BOTH if trained else Direction.FORWARD
    assert plan.workload.direction is expected
