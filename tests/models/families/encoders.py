"""Encoders of text, and models of an encoder and a decoder, of transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import transformers

from tests.models.case import (
    BATCH,
    VOCABULARY,
    Case,
    padding_mask,
    random_ids,
    uneven_labels,
    without_dropout,
)

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
MODERN = SIZES | {"local_attention": 8, "global_attn_every_n_layers": 2}
TWO_STACKS = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "decoder_start_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BART = TWO_STACKS | {"max_position_embeddings": 256, "forced_eos_token_id": None}
WHISPER = TWO_STACKS | {
    "num_mel_bins": 8,
    "max_source_positions": 43,
    "max_target_positions": 128,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}


def model(config: str, head: str, sizes: dict[str, Any]) -> nn.Module:
    """A model by the names of its classes in transformers, without dropout."""
    made = without_dropout(getattr(transformers, config)(**sizes))
    module: nn.Module = getattr(transformers, head)(made)
    return module.train()


def masked_language(length: int) -> dict[str, Any]:
    """Every token has a label, but for some."""
    ids = random_ids(length)
    return {"input_ids": ids, "labels": uneven_labels(ids)}


def masked_language_padded(length: int) -> dict[str, Any]:
    """Rows of different lengths."""
    given = masked_language(length)
    return given | {"attention_mask": padding_mask(given["input_ids"])}


def classified(length: int) -> dict[str, Any]:
    """A label for each text, found at its first token."""
    labels = torch.randint(0, 2, (BATCH,))
    return {"input_ids": random_ids(length), "labels": labels}


def classified_padded(length: int) -> dict[str, Any]:
    """Padding on the right only: the first token is read."""
    given = classified(length)
    mask = torch.ones_like(given["input_ids"])
    mask[0, length - int(torch.randint(1, length // 2, ())) :] = 0
    return given | {"attention_mask": mask}


def translated(length: int) -> dict[str, Any]:
    """Source and target of different lengths."""
    return {
        "input_ids": random_ids(length),
        "labels": uneven_labels(random_ids(length + 4)),
    }


def translated_padded(length: int) -> dict[str, Any]:
    """Sources of different lengths."""
    given = translated(length)
    return given | {"attention_mask": padding_mask(given["input_ids"])}


def transcribed(length: int) -> dict[str, Any]:
    """86 frames of sound, which a convolution halves, and the text."""
    return {
        "input_features": torch.randn(BATCH, 8, 86),
        "labels": uneven_labels(random_ids(length)),
    }


def _text(
    name: str,
    classes: tuple[str, str],
    sizes: dict[str, Any],
    inputs: Callable[[int], dict[str, Any]],
    shard: tuple[str, ...] = ("input_ids", "labels"),
) -> Case:
    return Case(
        name,
        "transformers",
        functools.partial(model, *classes, sizes),
        inputs,
        dict.fromkeys(shard, 1),
        always_labels="decoder_start_token_id" in sizes,
    )


_BERT = ("BertConfig", "BertForMaskedLM")
_BERT_CLASSES = ("BertConfig", "BertForSequenceClassification")
_MODERN = ("ModernBertConfig", "ModernBertForMaskedLM")
_MASKED = ("input_ids", "labels", "attention_mask")

CASES = [
    _text("bert/default", _BERT, SIZES, masked_language),
    _text("bert/padded", _BERT, SIZES, masked_language_padded, _MASKED),
    _text("bert/classes", _BERT_CLASSES, SIZES, classified, ("input_ids",)),
    _text(
        "bert/classes_padded",
        _BERT_CLASSES,
        SIZES,
        classified_padded,
        ("input_ids", "attention_mask"),
    ),
    _text(
        "roberta/default",
        ("RobertaConfig", "RobertaForMaskedLM"),
        SIZES | {"pad_token_id": 1},
        masked_language,
    ),
    _text("modernbert/default", _MODERN, MODERN, masked_language),
    _text("modernbert/padded", _MODERN, MODERN, masked_language_padded, _MASKED),
    _text("t5/default", ("T5Config", "T5ForConditionalGeneration"), T5, translated),
    _text(
        "t5/padded",
        ("T5Config", "T5ForConditionalGeneration"),
        T5,
        translated_padded,
        _MASKED,
    ),
    _text(
        "t5/eager",
        ("T5Config", "T5ForConditionalGeneration"),
        T5 | {"attn_implementation": "eager"},
        translated,
    ),
    _text(
        "bart/default",
        ("BartConfig", "BartForConditionalGeneration"),
        BART,
        translated,
    ),
    _text(
        "whisper/default",
        ("WhisperConfig", "WhisperForConditionalGeneration"),
        WHISPER,
        transcribed,
        ("labels",),
    ),
]
