"""flex_attention as models call it: functions of q, k, v [B, H, S, D], S = LENGTH."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

LENGTH = 17
_documents = torch.arange(LENGTH) // 5


@contextmanager
def gradients_on_cpu() -> Iterator[None]:
    """torch refuses these; its plain implementation has them."""
    with mock.patch.object(flex, "_validate_device", lambda *_: None):
        yield


def _causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def _same_document(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (_documents[q_idx] == _documents[kv_idx])


def _window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 5)


def _cap(score, b, h, q_idx, kv_idx):
    return 5.0 * torch.tanh(score / 5.0)


def _block_mask(mask_mod):
    return create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device="cpu")


CAUSAL, DOCUMENTS, WINDOW = map(_block_mask, (_causal, _same_document, _window))


def _sloped(sinks: Tensor) -> Callable[..., Tensor]:
    """Slopes that are learned."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + sinks[h] * (kv_idx - q_idx)

    return score_mod


def relative(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """A learned bias per head and distance."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[(q_idx - kv_idx).clamp(-8, 7) + 8, h]

    return flex_attention(q, k, v, score_mod=score_mod)


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Sinks after the attention, as torchtitan's gpt-oss has them."""
    given = {"block_mask": WINDOW, "enable_gqa": True, "return_lse": True}
    out, lse = flex_attention(q, k[:, :2], v[:, :2], **given)
    return out * torch.sigmoid(lse - sinks.view(1, -1, 1)).unsqueeze(-1)


def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two attentions of the same queries as one, by their log-sum-exps."""
    capped = {"score_mod": _cap, "return_aux": AuxRequest(lse=True)}
    one, aux = flex_attention(q, k, v, **capped)
    two, lse = flex_attention(q, k, v, block_mask=CAUSAL, return_lse=True)
    total = torch.logaddexp(aux.lse, lse)
    weights = ((x - total).exp().unsqueeze(-1) for x in (aux.lse, lse))
    return sum(w * x for w, x in zip(weights, (one, two), strict=True))


def lse_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The attention itself is not read."""
    _, lse = flex_attention(q, k, v, block_mask=CAUSAL, return_lse=True)
    return v * lse.unsqueeze(-1).tanh()


def squared(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """A learned factor of each head, and grouped heads."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + score**2 * sinks[h] * 0.1

    given = {"score_mod": score_mod, "block_mask": DOCUMENTS, "enable_gqa": True}
    return flex_attention(q, k[:, :2], v[:, :2], **given)


def waved(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """Of the score and of the distance, under a mask that no key ranges say."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.sin(score) + table[(q_idx - kv_idx).abs().clamp(max=15), h]

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx * kv_idx) % 3 != 1

    given = {"score_mod": score_mod, "block_mask": _block_mask(mask_mod)}
    return flex_attention(q, k, v, **given)


def weighted_keys(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Captured values that are computed of tokens, and all four numbers."""
    weight = v.square().mean((1, 3)).sigmoid()  # [B, S]

    def score_mod(score, b, h, q_idx, kv_idx):
        near = (q_idx - kv_idx) < 3 + h + b
        return torch.where(near, score * weight[b, kv_idx], score * sinks[h])

    return flex_attention(q, k, v, score_mod=score_mod, block_mask=CAUSAL)


def _logarithm(score, b, h, q_idx, kv_idx):
    """Of negative numbers, which the mask hides."""
    return torch.sin(score) - torch.log(q_idx - kv_idx + 1.0)


def biased_lse(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """The log-sum-exp of scores with a bias, under which rows could be raised."""
    given = {"score_mod": _sloped(sinks), "block_mask": CAUSAL, "return_lse": True}
    out, lse = flex_attention(q, k, v, **given)
    return out * lse[..., None].sigmoid()


def _unnamed(score, b, h, q_idx, kv_idx):
    """A function of scores that has no name."""
    return score * torch.sigmoid(score)


def _drawn(score, b, h, q_idx, kv_idx):
    """Numbers that are drawn anew for every score."""
    return score + 0.0 * torch.rand_like(score)


Form = Callable[..., Tensor]


def of(score_mod: Form | None = None, mask: BlockMask | None = None) -> Form:
    """Attention with these alone."""
    return lambda q, k, v: flex_attention(q, k, v, score_mod, block_mask=mask)


# Functions of the scores that are computed by parts.
SCORE_MODS: dict[str, Form] = {
    "of_the_score": of(_unnamed, CAUSAL),
    "not_finite_where_hidden": of(_logarithm, CAUSAL),
    **{x.__name__: x for x in (squared, waved, weighted_keys, biased_lse)},
}
FORMS: dict[str, Form] = {
    "everything": of(),
    "documents": of(mask=DOCUMENTS),
    "window": of(mask=WINDOW),
    "softcap": of(_cap, CAUSAL),
    "grouped": lambda q, k, v: flex_attention(
        q, k[:, :2], v[:, :2], block_mask=CAUSAL, enable_gqa=True
    ),
    # the block mask is made in the compiled function
    "made_inside": lambda q, k, v: flex_attention(
        q, k, v, block_mask=_block_mask(_causal), scale=0.3
    ),
    "alibi": lambda q, k, v, sinks: of(_sloped(sinks), CAUSAL)(q, k, v),
    **{x.__name__: x for x in (relative, with_sinks, merged, lse_alone)},
}
LEFT: dict[str, Form] = {"random": of(_drawn, CAUSAL)}
CALLS_OF_LAYER = dict.fromkeys(FORMS | SCORE_MODS, 1) | {
    "merged": 2
}  # that are shared out
