"""Decoders in plain PyTorch whose attention is not scaled_dot_product_attention."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
)

from tests.models.case import VOCABULARY, Case, with_labels
from tests.models.families.small_gpt import SmallGPT
from tests.support.forms.flex_forms import gradients_on_cpu

CONTEXT = 128
END_OF_TEXT = 2


class BufferedAttention(nn.Module):
    """As minGPT's: a buffer of the causal mask, and modules of dropout."""

    bias: Tensor

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.weights_dropout = nn.Dropout(0.0)
        self.out_dropout = nn.Dropout(0.0)
        ones = torch.ones(CONTEXT, CONTEXT)
        self.register_buffer("bias", torch.tril(ones).view(1, 1, CONTEXT, CONTEXT))

    def forward(self, x: Tensor) -> Tensor:
        B, S, C = x.size()
        q, k, v = self.qkv(x).split(C, dim=2)
        q, k, v = (
            y.view(B, S, self.heads, C // self.heads).transpose(1, 2) for y in (q, k, v)
        )
        weights = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        weights = weights.masked_fill(self.bias[:, :, :S, :S] == 0, float("-inf"))
        weights = self.weights_dropout(F.softmax(weights, dim=-1))
        y = (weights @ v).transpose(1, 2).contiguous().view(B, S, C)
        return self.out_dropout(self.out(y))


class SlopedAttention(nn.Module):
    """ALiBi: a bias that is linear in the distance, with a slope for each head."""

    slopes: Tensor

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        exponents = torch.arange(1, heads + 1, dtype=torch.float32) * (8 / heads)
        self.register_buffer("slopes", 2.0**-exponents)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        at = torch.arange(x.shape[1], device=x.device)
        distance = at[None, :] - at[:, None]
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
        scores = scores + self.slopes[:, None, None] * distance
        scores = scores.masked_fill(distance > 0, float("-inf"))
        y = torch.einsum("bhij,bjhd->bihd", scores.softmax(dim=-1), v)
        return self.out(y.flatten(2))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """[B, S, H, D], [S, D / 2] -> [B, S, H, D], turned by complex numbers."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    turn = torch.polar(torch.ones_like(angles), angles)[None, :, None]
    return torch.view_as_real(pairs * turn).flatten(3)


class FlexLayer(nn.Module):
    """As of torchtitan's Llama: grouped heads, rotary positions, a block mask."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, key_heads * self.head_dim, bias=False)
        self.v = nn.Linear(width, key_heads * self.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_1 = nn.RMSNorm(width)
        self.norm_2 = nn.RMSNorm(width)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor, mask: BlockMask) -> Tensor:
        B, S, C = x.shape
        y = self.norm_1(x)
        q, k, v = (w(y).view(B, S, -1, self.head_dim) for w in (self.q, self.k, self.v))
        q, k = rotate(q, angles), rotate(k, angles)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, S, C))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class FlexDecoder(nn.Module):
    """A decoder that gets its block mask with the tokens, as torchtitan's do."""

    angles: Tensor

    def __init__(self, width: int = 64, heads: int = 4, key_heads: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(FlexLayer(width, heads, key_heads) for _ in "12")
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        dim = width // heads
        speeds = 10000.0 ** (-torch.arange(0, dim, 2) / dim)
        angles = torch.outer(torch.arange(CONTEXT), speeds)
        self.register_buffer("angles", angles, persistent=False)

    def forward(
        self, tokens: Tensor, mask: BlockMask, labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(tokens)
        angles = self.angles[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, angles, mask)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits, None
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
        return logits, loss


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A mask_mod."""
    return q_idx >= kv_idx


texts = functools.partial(with_labels, name="tokens")


def documents(length: int) -> dict[str, Any]:
    """Documents in a row, which end at a token, and the mask of them."""
    given = texts(length)
    ids = given["tokens"]
    ids[0, int(torch.randint(1, length, ()))] = END_OF_TEXT
    ids[1, length // 3] = ids[1, length // 2] = END_OF_TEXT
    ends = (ids == END_OF_TEXT).long()
    document = ends.cumsum(1) - ends  # the token that ends one is of it

    def same_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return document[b, q_idx] == document[b, kv_idx]

    mask_mod = and_masks(causal, same_document)
    mask = create_block_mask(mask_mod, len(ids), None, length, length, device="cpu")
    return given | {"mask": mask}


def gpt_case(name: str, **changes: Any) -> Case:
    """A GPT of some attention."""
    made = functools.partial(SmallGPT, VOCABULARY, context=CONTEXT, **changes)
    return Case(name, "plain PyTorch", made, texts, SHARD, loss="1")


SHARD = {"tokens": 1, "labels": 1}
CASES = [
    gpt_case("min_gpt/default", attention=BufferedAttention),
    gpt_case("alibi_gpt/default", attention=SlopedAttention),
    Case(
        "flex_decoder/documents",
        "plain PyTorch",
        FlexDecoder,
        documents,
        SHARD,
        loss="1",
        around=gradients_on_cpu,
    ),
]
