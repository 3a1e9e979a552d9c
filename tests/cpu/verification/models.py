"""A model in which every kind of fault can be planted, and its inputs."""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCABULARY, WIDTH, HEADS, KV_HEADS = 61, 32, 4, 2


class Attention(nn.Module):
    """Causal attention with fewer key heads than query heads."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH * KV_HEADS // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (
            part.unflatten(-1, (KV_HEADS, -1)).transpose(1, 2)
            for part in self.kv(x).chunk(2, dim=-1)
        )
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """One block of a language model; the loss leaves out some labels.

    mixes: whether a sum over tokens follows, which needs them in their order.
    """

    def __init__(self, mixes=False):
        super().__init__()
        self.mixes = mixes
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(128, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, labels, padding=None):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(places)
        mask = None
        if padding is not None:
            mask = padding[:, None, None, :] & (places[:, None] >= places)
        x = x + self.attention(self.norm(x), mask)
        if self.mixes:
            x = x + x.cumsum(1) / tokens.shape[1]
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def make_model(**settings):
    """The model with the same weights wherever it is made."""
    torch.manual_seed(0)
    return Model(**settings)


def make_inputs(length=24, padded=False):
    """Tokens, labels of which ranks have unevenly many, and maybe padding."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (2, length), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[:, : length // 3] = -100
    inputs = {"tokens": tokens, "labels": labels}
    if padded:
        padding = torch.ones(2, length, dtype=torch.bool)
        padding[1, -3:] = False
        inputs["padding"] = padding
    return inputs


def make_model_and_inputs():
    """What the command line calls."""
    return make_model(), make_inputs()
