"""The transformers that torch itself has, and a GPT in plain PyTorch."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from tests.models.case import BATCH, VOCABULARY, Case, random_ids
from tests.models.families.own_attention import gpt_case

WIDTH, HEADS = 64, 4


class Classifier(nn.Module):
    """Token ids, a table of positions, nn.TransformerEncoder, a mean and a head."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 128, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 96, dropout=0.0, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(
        self,
        tokens: Tensor,
        padding: Tensor | None = None,
        causal: bool = False,
        detect: bool = False,
    ) -> Tensor:
        """`padding` is True at tokens that are none; `detect` leaves torch to find out
        that the mask is causal."""
        length = tokens.shape[1]
        x = self.embedding(tokens) + self.positions[:, :length]
        mask = None
        if causal or detect:
            mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.encoder(
            x,
            mask=mask,
            src_key_padding_mask=padding,
            is_causal=True if causal else None,
        )
        return self.head(x.mean(1))


class Translator(nn.Module):
    """nn.TransformerDecoder over a memory of another length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerDecoderLayer(
            WIDTH, HEADS, 96, dropout=0.0, batch_first=True
        )
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, memory: Tensor) -> Tensor:
        """[B, S] token ids, [B, T, C] memory -> [B, S, V]."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.decoder(
            self.embedding(tokens), memory, tgt_mask=mask, tgt_is_causal=True
        )
        return self.head(x)


class Attention(nn.Module):
    """nn.MultiheadAttention of a sequence with itself."""

    def __init__(self, batch_first: bool = True, need_weights: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
        self.need_weights = need_weights

    def forward(self, x: Tensor, causal: bool = False) -> tuple[Tensor, Tensor | None]:
        """[B, S, C], or [S, B, C] if not batch_first."""
        mask = None
        if causal:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.attention(
            x, x, x, need_weights=self.need_weights, attn_mask=mask, is_causal=causal
        )


def tokens(length: int, **more: Any) -> dict[str, Any]:
    """Token ids."""
    return {"tokens": random_ids(length)} | more


def padded_tokens(length: int) -> dict[str, Any]:
    """Texts of different lengths."""
    padding = torch.zeros(BATCH, length, dtype=torch.bool)
    padding[0, length - int(torch.randint(1, length // 2, ())) :] = True
    return tokens(length) | {"padding": padding}


def translation(length: int) -> dict[str, Any]:
    """Token ids and a memory that is longer."""
    return tokens(length) | {"memory": torch.randn(BATCH, length + 4, WIDTH)}


def sequence(length: int, dim: int = 1, **more: Any) -> dict[str, Any]:
    """Vectors [B, S, C], or [S, B, C] if the sequence is dimension 0."""
    return {"x": torch.randn(BATCH, length, WIDTH).transpose(1, dim)} | more


def _classifier(name: str, inputs: Any, **changes: Any) -> Case:
    made = functools.partial(Classifier, **changes)
    names = ["tokens", "padding"] if inputs is padded_tokens else ["tokens"]
    return Case(f"nn_encoder/{name}", "torch", made, inputs, dict.fromkeys(names, 1))


def _attention(name: str, inputs: Any, dim: int = 1, **changes: Any) -> Case:
    made = functools.partial(Attention, **changes)
    return Case(f"nn_attention/{name}", "torch", made, inputs, {"x": dim})


CASES = [
    gpt_case("small_gpt/default"),
    _classifier("default", tokens),
    _classifier("norm_first", tokens, norm_first=True),
    _classifier("causal", functools.partial(tokens, causal=True)),
    _classifier("causal_detected", functools.partial(tokens, detect=True)),
    _classifier("padded", padded_tokens),
    Case(
        "nn_decoder/default",
        "torch",
        Translator,
        translation,
        {"tokens": 1, "memory": 1},
    ),
    _attention("default", sequence),
    _attention("causal", functools.partial(sequence, causal=True)),
    _attention("weights", sequence, need_weights=True),
    _attention(
        "sequence_first", functools.partial(sequence, dim=0), 0, batch_first=False
    ),
]
