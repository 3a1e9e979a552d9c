"""Masks in the forms in which models build them, small functions of their own.

Every builder is mask_of(q, k, *inputs). Forms: broadcasting comparisons (transformers
5), torch.vmap (4.57), writes in place (4.46), and what people write themselves.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

LOWEST = torch.finfo(torch.float32).min


def sizes(q: Tensor, k: Tensor) -> tuple[int, int, int]:
    return q.shape[0], q.shape[-2], k.shape[-2]


def tokens(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """i [Sq, 1] and j [Sk]."""
    return torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])


def causal(q, k):
    i, j = tokens(q, k)
    return j <= i


def causal_tril(q, k):
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()


def causal_triu(q, k):
    """nn.Transformer.generate_square_subsequent_mask."""
    return torch.triu(torch.full((q.shape[-2], k.shape[-2]), float("-inf")), diagonal=1)


def causal_lowest(q, k):
    i, j = tokens(q, k)
    return torch.where(j <= i, 0.0, LOWEST)[None, None]


def causal_aligned_right(q, k):
    i, j = tokens(q, k)
    return j <= i + (k.shape[-2] - q.shape[-2])


def everything(q, k):
    return torch.zeros(q.shape[0], 1, q.shape[-2], k.shape[-2])


def banded(q, k):
    """x-transformers pads what limits how far back a query sees."""
    i, j = torch.arange(q.shape[-2]), torch.arange(k.shape[-2] - 1)
    seen = (i[:, None] >= j) & (i[:, None] - j <= 8)
    return F.pad(seen, (0, 1), value=False)


def shifted(q, k):
    """A causal mask whose keys begin with one that all see."""
    return F.pad(causal_tril(q, k)[:, :-1], (1, 0), value=True)


def padded_bias(q, k, bias):
    """x-transformers: heads without a bias."""
    return F.pad(bias, (0, 0, 0, 0, 0, 1))


def nothing(q, k):
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).logical_not()


def window(q, k, width=8):
    i, j = tokens(q, k)
    return (j > i - width) & (j <= i)


def both_sides(q, k):
    i, j = tokens(q, k)
    return (i - j).abs() <= 4


def chunks(q, k):
    i, j = tokens(q, k)
    return (j // 8 == i // 8) & (j <= i)


def sinks(q, k):
    """A window, and the first four keys: two intervals."""
    i, j = tokens(q, k)
    return ((j > i - 6) | (j < 4)) & (j <= i)


def static_documents(q, k):
    numbers = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3] * 3)
    return numbers[: q.shape[-2], None] == numbers[: k.shape[-2]]


def broadcast(q: Tensor, k: Tensor, mask_function: Callable[..., Tensor]) -> Tensor:
    """transformers 5."""
    batch, queries, keys = sizes(q, k)
    index = (
        torch.arange(batch)[:, None, None, None],
        torch.arange(1)[None, :, None, None],
        (torch.arange(queries) + 0)[None, None, :, None],
        (torch.arange(keys) + 0)[None, None, None, :],
    )
    return mask_function(*index).expand(batch, -1, queries, keys)


def vmapped(q: Tensor, k: Tensor, mask_function: Callable[..., Tensor]) -> Tensor:
    """As transformers 4.57 does it."""
    batch, queries, keys = sizes(q, k)
    for at in (3, 2, 1, 0):
        dims = [None] * 4
        dims[at] = 0
        mask_function = torch.vmap(mask_function, in_dims=tuple(dims), out_dims=0)
    ranges = (torch.arange(n) for n in (batch, 1, queries, keys))
    return mask_function(*ranges)


def packed(position_ids: Tensor) -> Tensor:
    """transformers' find_packed_sequence_indices."""
    first = position_ids[:, :1] - 1
    return (torch.diff(position_ids, prepend=first, dim=-1) != 1).cumsum(-1)


def packed_function(position_ids: Tensor, inner: Callable[..., Tensor]):
    documents = packed(position_ids)

    def function(b, h, i, j):
        result = i.new_ones((), dtype=torch.bool)
        result = result & (documents[b, i] == documents[b, j])
        return result & inner(b, h, position_ids[b, i], position_ids[b, j])

    return function


def packed_by_broadcast(q, k, position_ids):
    inner = packed_function(position_ids, lambda b, h, i, j: j <= i)
    return broadcast(q, k, inner)


def packed_windows(q, k, position_ids):
    def inner(b, h, i, j):
        return (j <= i) & (j > i - 5)

    return broadcast(q, k, packed_function(position_ids, inner))


def packed_chunks(q, k, position_ids):
    def inner(b, h, i, j):
        return (j <= i) & (j // 4 == i // 4)

    return broadcast(q, k, packed_function(position_ids, inner))


def packed_without_inputs(q, k):
    positions = (torch.arange(q.shape[-2]) + 0).unsqueeze(0).expand(q.shape[0], -1)
    return packed_by_broadcast(q, k, positions)


def padded_by_broadcast(q, k, attention_mask):
    visible = attention_mask.to(torch.bool)
    return broadcast(q, k, lambda b, h, i, j: (j <= i) & visible[b, j])


def vmap_causal(q, k):
    return vmapped(q, k, lambda b, h, i, j: j <= i)


def vmap_padded(q, k, attention_mask):
    visible = attention_mask.to(torch.bool)
    return vmapped(q, k, lambda b, h, i, j: (j <= i) & visible[b, j])


def chunks_after_padding(q, k, attention_mask):
    """Llama 4."""
    left = (attention_mask.cumsum(-1) == 0).sum(-1)

    def inner(b, h, i, j):
        same = (j - left[b]) // 8 == (i - left[b]) // 8
        return same & (j <= i) & attention_mask.bool()[b, j]

    return broadcast(q, k, inner)


def in_place_window(q, k):
    """Mistral of transformers 4.46: a key more than there are, multiplied in place."""
    queries = q.shape[-2]
    at = torch.arange(queries)
    mask = torch.full((queries, queries + 1), LOWEST)
    hidden = torch.arange(queries + 1) > at.reshape(-1, 1)
    hidden.bitwise_or_(torch.arange(queries + 1) <= at.reshape(-1, 1) - 8)
    mask *= hidden
    return mask[None, None].expand(q.shape[0], 1, -1, -1)[:, :, :, :queries]


def in_place_padded(q, k, attention_mask):
    """Llama of transformers 4.46."""
    queries, keys = q.shape[-2], attention_mask.shape[-1]
    mask = torch.triu(torch.full((queries, keys + 1), LOWEST), diagonal=1)
    mask *= torch.arange(keys + 1) > torch.arange(queries).reshape(-1, 1)
    mask = mask[None, None].expand(q.shape[0], 1, -1, -1).clone()
    hidden = mask[:, :, :, :keys] + attention_mask[:, None, None, :]
    part = mask[:, :, :, :keys].masked_fill(hidden == 0, LOWEST)
    mask[:, :, :, :keys] = part
    return mask[:, :, :, : k.shape[-2]]


def in_place_fill(q, k):
    """GPT-2 and OPT of transformers 4."""
    n = q.shape[-2]
    mask = torch.full((n, n), LOWEST)
    at = torch.arange(n)
    mask.masked_fill_(at < (at + 1).view(n, 1), 0)
    return mask


def in_place_through_a_view(q, k):
    """The first three keys are hidden through another name."""
    mask = causal(q, k).clone()
    mask[:, :3].fill_(False)
    return mask


def padding(q, k, attention_mask):
    return attention_mask[:, None, None, :].bool()


def padding_of_numbers(q, k, attention_mask):
    """BERT: added to the scores."""
    extended = attention_mask[:, None, None, :].to(torch.float32)
    return torch.where(extended > 0, 0.0, float("-inf"))


def pairs_of_padding(q, k, attention_mask):
    visible = attention_mask.bool()
    return visible[:, None, :, None] & visible[:, None, None, :]


def causal_padding_lowest(q, k, attention_mask):
    """A row that is hidden everywhere sees all keys: no limit and no id says so."""
    return torch.where(padded_by_broadcast(q, k, attention_mask), 0.0, LOWEST)


def documents(q, k, numbers):
    i, j = tokens(q, k)
    return (numbers[:, None, :, None] == numbers[:, None, None, :]) & (j <= i)


def documents_and_padding(q, k, numbers, attention_mask):
    same = numbers[:, None, :, None] == numbers[:, None, None, :]
    return same & attention_mask.bool()[:, None, None, :]


def two_equalities(q, k, numbers, others):
    same = numbers[:, None, :, None] == numbers[:, None, None, :]
    return same & (others[:, None, :, None] == others[:, None, None, :])


def prefix(q, k, lengths):
    """PaliGemma: all of the prefix is seen."""
    i, j = tokens(q, k)
    return (j <= i) | (j < lengths[:, None, None, None])


def prefix_of_pairs(q, k, lengths):
    i, j = tokens(q, k)
    n = lengths[:, None, None, None]
    return (j <= i) | ((i < n) & (j < n))


def lengths_of_keys(q, k, lengths):
    return (torch.arange(k.shape[-2]) < lengths[:, None])[:, None, None, :]


def length_of_all(q, k, lengths):
    return torch.arange(k.shape[-2]).expand(q.shape[-2], -1) < lengths[0]


def lowest_twice(q, k, attention_mask):
    low = torch.full((q.shape[-2], k.shape[-2]), -3e38).triu(1)  # as low as padding
    return low + (1.0 - attention_mask[:, None, None, :].float()) * -3e38


def blocks(q, k, numbers):
    """Gemma 3: causal, but images see all of themselves. No interval, no ids."""
    i, j = tokens(q, k)
    g, h = numbers[:, None, :, None], numbers[:, None, None, :]
    return (j <= i) | ((g == h) & (g >= 0))


def alibi(q, k):
    i, j = tokens(q, k)
    slopes = torch.tensor([0.5, 0.25])
    return torch.where(j <= i, (j - i) * slopes[:, None, None], float("-inf"))


def relative(q, k, weight):
    """T5: a look-up by the distance; the weight is trained."""
    i, j = tokens(q, k)
    distance = j - i
    bucket = (distance > 0).long() * 4
    bucket = bucket + torch.minimum(distance.abs(), torch.full_like(distance, 3))
    return F.embedding(bucket, weight).permute(2, 0, 1).unsqueeze(0)


def given(q, k, mask):
    return mask


def given_and_causal(q, k, mask):
    return mask & causal(q, k)
