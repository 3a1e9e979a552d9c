"""Encoders of text, and models of an encoder and a decoder, of transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tests.models.case import (
    BATCH,
    SIZES,
    VOCABULARY,
    Case,
    hub_model,
    random_ids,
    uneven_labels,
    with_labels,
    with_padding,
)

BERT = SIZES | {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
MODERN = BERT | {"local_attention": 8, "global_attn_every_n_layers": 2}
OF_STACK = {"layers": 2, "attention_heads": 4, "ffn_dim": 96}
TWO_STACKS = {
    **{f"encoder_{name}": size for name, size in OF_STACK.items()},
    **{f"decoder_{name}": size for name, size in OF_STACK.items()},
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


def padded(make: Callable[[int], dict[str, Any]], length: int) -> dict[str, Any]:
    """Rows of different lengths."""
    return with_padding(make(length))


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


def transcribed(length: int) -> dict[str, Any]:
    """86 frames of sound, which a convolution halves, and the text."""
    return {
        "input_features": torch.randn(BATCH, 8, 86),
        "labels": uneven_labels(random_ids(length)),
    }


# Stem and ending of the classes, configuration, inputs, and which have a sequence.
_MASKED = ("Bert", "MaskedLM", BERT)
_CLASSES = ("Bert", "SequenceClassification", BERT)
_MODERN = ("ModernBert", "MaskedLM", MODERN)
_T5 = ("T5", "ConditionalGeneration", T5)
_BOTH = ("input_ids", "labels")
_PADDED = (*_BOTH, "attention_mask")
_TABLE: dict[str, tuple[str, str, dict[str, Any], Any, tuple[str, ...]]] = {
    "bert/default": (*_MASKED, with_labels, _BOTH),
    "bert/padded": (*_MASKED, functools.partial(padded, with_labels), _PADDED),
    "bert/classes": (*_CLASSES, classified, ("input_ids",)),
    "bert/classes_padded": (
        *_CLASSES,
        classified_padded,
        ("input_ids", "attention_mask"),
    ),
    "roberta/default": (
        *("Roberta", "MaskedLM", BERT | {"pad_token_id": 1}),
        *(with_labels, _BOTH),
    ),
    "modernbert/default": (*_MODERN, with_labels, _BOTH),
    "modernbert/padded": (*_MODERN, functools.partial(padded, with_labels), _PADDED),
    "t5/default": (*_T5, translated, _BOTH),
    "t5/padded": (*_T5, functools.partial(padded, translated), _PADDED),
    "t5/eager": (
        *("T5", "ConditionalGeneration", T5 | {"attn_implementation": "eager"}),
        *(translated, _BOTH),
    ),
    "bart/default": ("Bart", "ConditionalGeneration", BART, translated, _BOTH),
    "whisper/default": (
        *("Whisper", "ConditionalGeneration", WHISPER),
        *(transcribed, ("labels",)),
    ),
}
CASES = [
    Case(
        name,
        "transformers",
        functools.partial(hub_model, stem, f"{stem}For{task}", sizes),
        inputs,
        dict.fromkeys(shard, 1),
        always_labels="decoder_start_token_id" in sizes,
    )
    for name, (stem, task, sizes, inputs, shard) in _TABLE.items()
]
