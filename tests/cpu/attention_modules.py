"""Calls of nn.MultiheadAttention and of the layers of nn.Transformer, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

WIDTH, HEADS, TEXT = 32, 4, 11
hide = nn.Transformer.generate_square_subsequent_mask


@dataclass(frozen=True)
class Case:
    """A module and the call that is compiled; `rewritten` says which calls are.

    The call gets the module, x [B, S, C] (or [S, B, C]) and text [B, T, C], whole.
    """

    make: Callable[[], nn.Module]
    call: Callable[[nn.Module, Tensor, Tensor], object]
    rewritten: tuple[bool, ...] = (True,)
    batch_first: bool = True


def attention(**given) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True} | given)


def without_weights(m, x, text):
    return m(x, x, x, need_weights=False)[0]


def layer(cls: type[nn.Module], **given) -> Callable[[], nn.Module]:
    given = {"dropout": 0.0, "batch_first": True} | given
    return lambda: cls(WIDTH, HEADS, 48, **given)


def encoder(**given) -> Callable[[], nn.Module]:
    make = layer(nn.TransformerEncoderLayer, **given)
    return lambda: nn.TransformerEncoder(make(), 2)


def causal_mask(x: Tensor) -> Tensor:
    return hide(x.shape[1]).to(x.dtype)


def padding(x: Tensor) -> Tensor:
    """True where a key is hidden: the end of the second sequence."""
    hidden = torch.zeros(x.shape[:2], dtype=torch.bool)
    hidden[1, -3:] = True
    return hidden


MODULES = {
    "self": Case(attention(), without_weights),
    "sequence first": Case(
        attention(batch_first=False), without_weights, batch_first=False
    ),
    "no bias": Case(attention(bias=False), without_weights),
    "causal": Case(
        attention(),
        lambda m, x, _: m(
            x, x, x, need_weights=False, attn_mask=causal_mask(x), is_causal=True
        )[0],
    ),
    "weights": Case(attention(), lambda m, x, _: m(x, x, x), ()),
    "weights of each head": Case(
        attention(), lambda m, x, _: m(x, x, x, average_attn_weights=False), ()
    ),
    "weights, sequence first": Case(
        attention(batch_first=False), lambda m, x, _: m(x, x, x), (), batch_first=False
    ),
    "weights, causal": Case(
        attention(), lambda m, x, _: m(x, x, x, attn_mask=causal_mask(x)), ()
    ),
    "one more key": Case(attention(add_bias_kv=True), without_weights),
    "a key of zeros": Case(attention(add_zero_attn=True), without_weights),
    "cross": Case(attention(), lambda m, x, t: m(x, t, t, need_weights=False)[0]),
    "cross, other dims": Case(
        attention(kdim=2 * WIDTH, vdim=WIDTH // 2),
        lambda m, x, t: m(
            x, torch.cat([t, t], -1), t[..., : WIDTH // 2], need_weights=False
        )[0],
    ),
    "encoder layer": Case(layer(nn.TransformerEncoderLayer), lambda m, x, _: m(x)),
    "norm first": Case(
        layer(nn.TransformerEncoderLayer, norm_first=True, activation="gelu"),
        lambda m, x, _: m(x),
    ),
    "encoder": Case(encoder(), lambda m, x, _: m(x), (True, True)),
    "encoder, sequence first": Case(
        encoder(batch_first=False), lambda m, x, _: m(x), (True, True), False
    ),
    "encoder, causal": Case(
        encoder(),
        lambda m, x, _: m(x, mask=causal_mask(x), is_causal=True),
        (True, True),
    ),
    "decoder layer": Case(
        layer(nn.TransformerDecoderLayer), lambda m, x, t: m(x, t), (True, True)
    ),
    "decoder layer, causal": Case(
        layer(nn.TransformerDecoderLayer),
        lambda m, x, t: m(x, t, tgt_mask=causal_mask(x), tgt_is_causal=True),
        (True, True),
    ),
}


# What is hidden arrives as a mask; today such a call runs on gathered tensors.
MASKED = {
    "bool mask": Case(
        attention(),
        lambda m, x, _: m(
            x, x, x, need_weights=False, attn_mask=causal_mask(x).isinf()
        )[0],
    ),
    "float mask": Case(
        attention(),
        lambda m, x, _: m(x, x, x, need_weights=False, attn_mask=causal_mask(x))[0],
    ),
    "padding": Case(
        attention(),
        lambda m, x, _: m(x, x, x, need_weights=False, key_padding_mask=padding(x))[0],
    ),
    "float padding": Case(  # in float32 aten misreads it beside float64 (torch 2.13)
        attention(),
        lambda m, x, _: m(
            x,
            x,
            x,
            need_weights=False,
            key_padding_mask=padding(x).to(x.dtype) * -1e4,
        )[0],
    ),
    "padding and mask": Case(
        attention(),
        lambda m, x, _: m(
            x,
            x,
            x,
            need_weights=False,
            key_padding_mask=padding(x),
            attn_mask=causal_mask(x).isinf(),
        )[0],
    ),
    "mask of each head": Case(
        attention(),
        lambda m, x, _: m(
            x,
            x,
            x,
            need_weights=False,
            attn_mask=causal_mask(x).expand(2 * HEADS, -1, -1) * 1.0,
        )[0],
    ),
    "weights, padding": Case(
        attention(), lambda m, x, _: m(x, x, x, key_padding_mask=padding(x)), ()
    ),
    "encoder, padding": Case(
        encoder(), lambda m, x, _: m(x, src_key_padding_mask=padding(x)), (True, True)
    ),
    "more keys, padding": Case(
        attention(add_bias_kv=True, add_zero_attn=True),
        lambda m, x, _: m(x, x, x, need_weights=False, key_padding_mask=padding(x))[0],
    ),
}
