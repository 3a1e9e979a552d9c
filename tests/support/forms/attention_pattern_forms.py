"""Attention as models write it out: functions of q, k, v [B, H, S, D].

FORMS are attention over the sequence. TWINS look alike and are something else.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Form = Callable[..., Tensor]


def causal(q: Tensor) -> Tensor:
    """True where a query sees a key."""
    length = q.shape[-2]
    return torch.ones(length, length, dtype=torch.bool, device=q.device).tril()


def lowest(q: Tensor) -> float:
    return torch.finfo(q.dtype).min


def added(q: Tensor, hidden: Tensor) -> Tensor:
    """The lowest number where keys are hidden, to be added to scores."""
    return torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, lowest(q))


def first(q: Tensor, keys: int = 3) -> Tensor:
    """True for the first keys, which are padding.

    The first queries see nothing else. In the lowest number their scores are lost, of
    which autograd does not know where it is added.
    """
    return torch.arange(q.shape[-2], device=q.device) < keys


def upcast(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def functions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As the eager path of transformers: upcast, dropout that does nothing."""
    scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    scores = scores + added(q, ~causal(q))
    weights = F.softmax(scores, dim=-1, dtype=upcast(q)).to(q.dtype)
    weights = F.dropout(weights, p=0.1, training=False)
    return torch.matmul(weights, v).transpose(1, 2).contiguous().transpose(1, 2)


def filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As minGPT."""
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(causal(q)[None, None] == 0, float("-inf"))
    return F.softmax(scores, dim=-1) @ v


def filled_low(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first query sees no key: it gives the mean of the values."""
    hidden = causal(q).logical_not() | (torch.arange(q.shape[-2])[:, None] == 0)
    return (q @ k.mT / 2.0).masked_fill(hidden, -1e9).softmax(-1) @ v


def refilled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As CPM-Ant: weights of what is hidden are set to zero, by a mask made anew."""
    scores = (q @ k.mT / 2.0).masked_fill(causal(q) == torch.tensor(False), -math.inf)
    weights = scores.softmax(-1)
    return torch.masked_fill(weights, causal(q) == torch.tensor(False), 0.0) @ v


def refilled_low(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As ESPnet. The first query sees no key: it gives 0, and no mean."""
    hidden = causal(q).logical_not() | (torch.arange(q.shape[-2])[:, None] == 0)
    weights = (q @ k.mT / 2.0).masked_fill(hidden, lowest(q)).softmax(-1)
    return torch.where(hidden, 0.0, weights) @ v


def chosen_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As GPT-Neo, which does not divide by the root of the head dim."""
    scores = torch.matmul(q, k.transpose(-1, -2))
    value = torch.tensor(lowest(q), dtype=q.dtype, device=q.device)
    return torch.where(causal(q), scores, value).softmax(-1) @ v


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores *= 0.5
    scores += torch.arange(q.shape[-2], dtype=q.dtype)
    scores.masked_fill_(~causal(q), float("-inf"))
    return scores.softmax(-1) @ v


def scaled_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As T5 and nn.MultiheadAttention: the scale is in q already."""
    return torch.bmm(
        torch.bmm(q.flatten(0, 1) * 0.5, k.flatten(0, 1).mT).softmax(-1),
        v.flatten(0, 1),
    ).unflatten(0, q.shape[:2])


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As bloom: a bias per head and key, one batch for all heads, and views."""
    (B, H, S, D), heads = q.shape, q.flatten(0, 1)
    slopes = 2.0 ** -torch.arange(1, H + 1, dtype=q.dtype)
    bias = (slopes[:, None, None] * torch.arange(S)).to(q.dtype)
    scores = (
        bias.expand(B, H, 1, S)
        .reshape(B * H, 1, S)
        .baddbmm(heads, k.reshape(B * H, S, D).transpose(1, 2), beta=1.0, alpha=0.5)
    )
    scores = scores.view(B, H, S, S).masked_fill(~causal(q), lowest(q))
    weights = F.softmax(scores, dim=-1, dtype=upcast(q)).to(q.dtype)
    return torch.bmm(weights.view(B * H, S, S), v.flatten(0, 1)).view(B, H, S, D)


def narrow_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As MPT: a bias in float32, whose lowest number is not that of float64."""
    bias = torch.arange(1 - k.shape[-2], 1, dtype=torch.float32) * 0.25
    scores = q @ k.mT * 0.5 + bias
    return scores.masked_fill(~causal(q), lowest(scores)).softmax(-1) @ v


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Tokens come before heads, as in packages that use einops."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * 0.5
    scores.clone()  # as x-transformers does for a caller who may want them
    weights = scores.softmax(dim=-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v).transpose(1, 2)


def one_key_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("b h i d, b j d -> b h i j", q, k[:, 0])
    scores = scores.masked_fill(~causal(q), lowest(q))
    return torch.einsum("bhij,bjd->bhid", scores.softmax(-1), v[:, 0])


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys and values are repeated for their query heads."""
    k, v = (x[:, :2, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for x in (k, v))
    return torch.where(causal(q), q @ k.mT, -torch.inf).softmax(-1) @ v


def channels_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As the attention of diffusion models: keys are rows, and columns sum to 1."""
    weights = F.softmax(torch.matmul(k, q.mT) * 0.5, dim=2)
    return torch.matmul(v.mT, weights).mT


def softcapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As gemma2."""
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.5
    scores = torch.tanh(scores / 2.0)
    scores = scores * 2.0
    scores = scores.masked_fill(~causal(q), lowest(q))
    return F.softmax(scores, dim=-1, dtype=upcast(q)).to(q.dtype) @ v


def relative(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """As T5: a learned bias per head and distance, which is added in place."""
    at = torch.arange(q.shape[-2])
    far = (at[None] - at[:, None]).clamp(-8, 7) + 8
    bias = F.embedding(far, table).permute(2, 0, 1).unsqueeze(0)
    scores = torch.matmul(q, k.transpose(3, 2))
    scores += bias + added(q, ~causal(q))
    return torch.matmul(F.softmax(scores, dim=-1).type_as(scores), v)


def upcast_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As GPT-J and CodeGen: scores in float32, whatever the dtype of the model."""
    dtype = upcast(q)
    scores = torch.matmul(q.to(dtype), k.to(dtype).transpose(-1, -2)) / 2.0
    return torch.matmul(scores.softmax(-1).to(v.dtype), v)


def of_all_pairs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask that is no function of positions."""
    hidden = causal(q).cumsum(0).cumsum(1) % 3 == 2
    return torch.where(hidden, -torch.inf, q @ k.mT).softmax(-1) @ v


def low_then_added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As GPT-2 with padding in older transformers; the scale is a constant tensor."""
    scale = torch.full([], 2.0, dtype=q.dtype, device=q.device)
    low = torch.full((), lowest(q), dtype=q.dtype, device=q.device)
    padding = torch.zeros(1, 1, 1, q.shape[-2], dtype=q.dtype)
    padding = padding.masked_fill(torch.arange(q.shape[-2]) == 1, lowest(q))
    seen = causal(q) & (torch.arange(q.shape[-2])[:, None] > 0)
    scores = torch.where(seen, (q @ k.mT).div(scale), low) + padding
    return scores.softmax(-1) @ v


def of_the_shape(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As DistilBERT: a mask of keys, and a bias, become what the scores are like."""
    scores = q @ k.mT
    scores = scores + torch.arange(q.shape[-2]).type_as(scores)
    hidden = (torch.arange(q.shape[-2]) % 5 == 2).view(1, 1, 1, -1).expand_as(scores)
    low = torch.full((), float("-inf"), dtype=q.dtype, device=q.device)
    return scores.masked_fill(hidden, low).softmax(-1) @ v


def learned_temperature(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """As Swin V2: a learned number for every head, and a mask after it."""
    scores = (q @ k.mT) * sinks.sigmoid().exp()[:, None, None]
    return scores.masked_fill(~causal(q), -torch.inf).softmax(-1) @ v


def divided_and_capped(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """A learned number for all heads."""
    scores = 0.5 * (q @ k.mT) / sinks.square().sum()
    return (3.0 * torch.tanh(scores / 3.0)).softmax(-1) @ v


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """As gpt-oss: a score per head without a value, and scores less their maximum."""
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.5
    scores = scores.masked_fill(~causal(q), lowest(q))
    column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    scores = torch.cat([scores, column], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    weights = F.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1]
    return torch.matmul(F.dropout(weights, p=0.0, training=True), v)


def beside(scores: Tensor, sinks: Tensor, v: Tensor) -> Tensor:
    """Attention by scores, and by one for every head that has no value."""
    column = sinks[None, :, None, None].expand(scores.shape[0], -1, scores.shape[2], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


def sinks_of_hidden_rows(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """The first queries see nothing but sinks, as those of padding on the left."""
    return beside((q @ k.mT) * 0.5 + added(q, ~causal(q) | first(q)), sinks, v)


def sinks_and_low_bias(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """The same by -1e9, in a bias of pairs that is no function of a distance."""
    at = torch.arange(q.shape[-2], dtype=q.dtype)
    bias = (at[:, None] * at * 0.37).sin()
    bias = bias.masked_fill(~causal(q) | (at < 3), -1e9)
    return beside(q @ k.mT + bias, sinks, v)


def lost(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As "eager" models of transformers with padding on the left."""
    return (q @ k.mT * 0.5 + added(q, ~causal(q) | first(q))).softmax(-1) @ v


def lost_with_softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As Gemma 2."""
    scores = torch.tanh(q @ k.mT * 0.5 / 3.0) * 3.0
    return (scores + added(q, ~causal(q) | first(q))).softmax(-1) @ v


def lost_and_filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As older GPT-2: what is causal replaces scores, and padding is added to them."""
    low = torch.full((), lowest(q), dtype=q.dtype, device=q.device)
    scores = torch.where(causal(q), q @ k.mT * 0.5, low)
    return (scores + added(q, first(q).view(1, 1, 1, -1))).softmax(-1) @ v


FORMS: dict[str, Form] = {
    "plain": lambda q, k, v: (q @ k.transpose(-2, -1)).softmax(-1) @ v,
    "softcapped_everywhere": lambda q, k, v: (
        (3.0 * torch.tanh((q @ k.mT) / 3.0)).softmax(-1) @ v
    ),
    # as DeBERTa: a second product of activations is added
    "disentangled": lambda q, k, v: (q @ k.mT + v @ k.mT).softmax(-1) @ v,
    # scores are multiplied by a number for every query
    "temperature": lambda q, k, v: (
        ((q @ k.mT) * q.mean(-1, keepdim=True)).softmax(-1) @ v
    ),
    "with_sinks_everywhere": lambda q, k, v, sinks: beside(q @ k.mT, sinks, v),
} | {
    form.__name__: form
    for form in (
        *(functions, filled, filled_low, refilled, refilled_low, chosen_tensor),
        *(in_place, scaled_first, alibi, einsum, one_key_head, grouped),
        *(channels_first, softcapped, relative, of_all_pairs, upcast_by_hand),
        *(low_then_added, of_the_shape, narrow_bias, learned_temperature),
        *(divided_and_capped, with_sinks, sinks_of_hidden_rows, sinks_and_low_bias),
        *(lost, lost_with_softcap, lost_and_filled),
    )
}


def refilled_less(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Half of what is hidden by a low number is set to zero."""
    first = torch.arange(q.shape[-2])[:, None] == 0
    scores = (q @ k.mT).masked_fill(first, -1e9).masked_fill(~causal(q), -1e9)
    return scores.softmax(-1).masked_fill(~causal(q), 0.0) @ v


def refilled_another_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(causal(q).logical_not(), -torch.inf)
    return scores.softmax(-1).masked_fill(causal(q).logical_not().mT, 0.0) @ v


def over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each token attends to its own heads."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2)


def weights_read_again(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return weights @ v + weights.sum(-1, keepdim=True).cos()


def windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Four tokens each, which lie together."""
    q, k, v = (x.unflatten(2, (-1, 4)) for x in (q, k, v))
    return ((q @ k.mT).softmax(-1) @ v).flatten(2, 3)


def added_to_a_low_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows without another key see what is added, and -1e4 is not the lowest number."""
    scores = (q @ k.mT).masked_fill(~causal(q), -1e4)
    return (scores + torch.arange(q.shape[-2], dtype=q.dtype)).softmax(-1) @ v


def shape_read_elsewhere(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is as large as the scores is not for them alone."""
    scores = q @ k.mT
    far = (torch.arange(q.shape[-2]) % 5 == 2).expand_as(scores)
    return scores.masked_fill(far, -torch.inf).softmax(-1) @ v + far.sum(-1)[..., None]


def less_its_largest(scores: Tensor, dim: int) -> Tensor:
    return scores - scores.amax(dim, keepdim=True)


TWINS: dict[str, Form] = {
    # as XCiT: channels attend to channels
    "over_channels": lambda q, k, v: ((q.mT @ k).softmax(-1) @ v.mT).mT,
    # the softmax is over the queries
    "over_rows": lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    # no product of queries and keys has a softmax
    "linear": lambda q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v),
    # scores are multiplied by a number for every key
    "temperature_of_keys": lambda q, k, v: (
        ((q @ k.mT) * k.mean(-1)[..., None, :]).softmax(-1) @ v
    ),
    "scaled_until_it_hides_nothing": lambda q, k, v: (
        ((q @ k.mT).masked_fill(~causal(q), -1e4) * 1e-4).softmax(-1) @ v
    ),
    # less the maximum of each key, which changes the softmax over keys
    "shifted_by_columns": lambda q, k, v: (
        less_its_largest(q @ k.mT, -2).softmax(-1) @ v
    ),
    # scores are shifted, and the sinks are not
    "shifted_before_sinks": lambda q, k, v, sinks: beside(
        less_its_largest(q @ k.mT, -1), sinks, v
    ),
    "raised_before_sinks": lambda q, k, v, sinks: beside(q @ k.mT + 1.0, sinks, v),
} | {
    form.__name__: form
    for form in (
        *(over_heads, weights_read_again, windows, added_to_a_low_number),
        *(shape_read_elsewhere, refilled_less, refilled_another_mask),
    )
}


class Model(torch.nn.Module):
    """Two layers of attention in one of these forms, with a loss over all tokens."""

    def __init__(self, form: Form, heads: int = 4, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.heads = form, heads
        self.embedding = torch.nn.Embedding(37, width)
        self.qkv = torch.nn.ModuleList(
            torch.nn.Linear(width, 3 * width) for _ in range(2)
        )
        self.out = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(2))
        self.head = torch.nn.Linear(width, 37)
        self.sinks = torch.nn.Parameter(torch.randn(heads))
        self.table = torch.nn.Parameter(torch.randn(16, heads))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = (
                y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for y in qkv(x).chunk(3, -1)
            )
            own = {"sinks": self.sinks, "table": self.table}
            given = list(inspect.signature(self.form).parameters)[3:]
            more = [own[name] for name in given]
            x = x + out(self.form(q, k, v, *more).transpose(1, 2).flatten(2))
        logits: Tensor = self.head(x)
        return logits
