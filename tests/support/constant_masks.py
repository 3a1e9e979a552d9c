"""A model whose mask is a buffer, in the forms in which models keep one."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

LONGEST, WIDTH, HEADS = 40, 16, 2
LOWEST = torch.finfo(torch.float32).min


def causal(window: int = LONGEST) -> Tensor:
    seen = torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril()
    return seen & ~seen.tril(-window)


def numbers(seen: Tensor, hidden: float = -torch.inf) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, hidden)


def blocks() -> Tensor:
    """Of documents of different lengths, one after the other."""
    document = torch.arange(LONGEST).sqrt().long()
    return document[:, None] == document


def per_head() -> Tensor:
    return torch.stack([causal(3), causal(5)])


def alibi() -> Tensor:
    distance = torch.arange(LONGEST) - torch.arange(LONGEST)[:, None]
    return numbers(causal()) + distance * torch.tensor([0.5, 0.25]).view(-1, 1, 1)


def outer_product() -> Tensor:
    at = torch.arange(LONGEST) / LONGEST
    return at[:, None] * at


def holes() -> Tensor:
    drawn = torch.rand(LONGEST, LONGEST, generator=torch.Generator().manual_seed(1))
    return (causal() & (drawn > 0.3)).fill_diagonal_(True)


# What the buffer is, and what is read of it: 24 tokens see the first part.
READ = {
    "bool": (causal(), "is_causal"),
    "numbers": (numbers(causal()), "is_causal"),
    "lowest": (numbers(causal(), LOWEST), "is_causal"),
    "four dims": (causal()[None, None], "is_causal"),
    "window": (numbers(causal(6)), "causal, window 6"),
    "blocks": (blocks(), "key ranges"),
    "two-sided": (causal(4) | causal(4).T, "window of 3 to each side"),
    "alibi": (alibi(), "causal, bias by distance"),
    "small numbers": (numbers(causal(), -5.0), "bias by distance"),
    "everything": (torch.zeros(LONGEST, LONGEST), "none"),
}
STAYS = {
    "holes": (holes(), "dense bool [24, 24]"),
    "per head": (per_head(), "dense bool [2, 24, 24]"),
    "outer product": (outer_product(), "dense float32 [24, 24]"),
    "no key": (numbers(causal().tril(-1), LOWEST), "dense float32 [24, 24]"),
}


class Masked(nn.Module):
    """open_clip: a causal buffer, of which each call takes a part."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("attn_mask", mask.clone(), persistent=False)
        self.embedding = nn.Embedding(50, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def mask(self, x: Tensor, *inputs: Tensor) -> Tensor:
        tokens = x.shape[1]
        mask = self.attn_mask[..., :tokens, :tokens]
        return mask if mask.dtype == torch.bool else mask.to(x.dtype)

    def forward(self, tokens: Tensor, *inputs: Tensor) -> Tensor:
        x = self.embedding(tokens)
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in parts)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x, *inputs))
        return y.transpose(1, 2).flatten(2).sin().sum(-1).square().mean()


class Attribute(Masked):
    """OpenAI's CLIP: a tensor that is an attribute of the module, and no buffer."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask)
        del self.attn_mask
        self.attn_mask = mask.clone()


class Item(Masked):
    """A tensor in a dict of the module."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask)
        del self.attn_mask
        self.kept = {"mask": [mask.clone()]}

    def mask(self, x: Tensor, *inputs: Tensor) -> Tensor:
        tokens = x.shape[1]
        return self.kept["mask"][0][..., :tokens, :tokens].to(x.dtype)


class Padded(Masked):
    """Its keys are padded besides."""

    def mask(self, x: Tensor, *inputs: Tensor) -> Tensor:
        (visible,) = inputs
        return super().mask(x) & visible[:, None, None, :]


class Writing(Masked):
    """The program itself writes the buffer."""

    def mask(self, x: Tensor, *inputs: Tensor) -> Tensor:
        seen = super().mask(x).clone()
        self.attn_mask[:, 0] = inputs[0]
        return seen


def token_ids(length: int = 24) -> Tensor:
    return torch.arange(2 * length).view(2, length) % 50
