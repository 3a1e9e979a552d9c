"""Small models of several kinds, whole: encoders, decoders, experts, image patches."""

from typing import ClassVar

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tests.cpu.against_one_process import compare_calls
from tests.cpu.on_ranks import on_ranks

VOCABULARY, WIDTH, HEADS = 50, 32, 4


def heads(x: Tensor) -> Tensor:
    """[B, S, C] -> [B, H, S, C / H]."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, y: Tensor | None = None, causal: bool = False):
        k, v = self.kv(x if y is None else y).chunk(2, dim=-1)
        out = F.scaled_dot_product_attention(
            heads(self.q(x)), heads(k), heads(v), is_causal=causal
        )
        return x + out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    """`inputs(seq)` are the arguments, `shard` their sequence dimensions."""

    shard: ClassVar[dict[str, int]] = {"tokens": 1}

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = nn.ModuleList([Attention(), Attention()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    @staticmethod
    def inputs(seq: int) -> dict[str, Tensor]:
        return {"tokens": torch.randint(0, VOCABULARY, (2, seq))}


class EncoderDecoder(Model):
    """Two lengths, labels shifted in place into a new tensor, tied weights."""

    shard: ClassVar = {"tokens": 1, "labels": 1}

    @staticmethod
    def inputs(seq):
        labels = torch.randint(0, VOCABULARY, (2, seq // 2 + 1))
        labels[0, seq // 4 :] = -100
        return {"tokens": torch.randint(0, VOCABULARY, (2, seq)), "labels": labels}

    def forward(self, tokens, labels):
        encoded = self.attention[0](self.embedding(tokens))
        shifted = labels.new_zeros(labels.shape)
        shifted[..., 1:] = labels[..., :-1].clone()
        shifted[..., 0] = 1
        shifted.masked_fill_(shifted == -100, 0)
        x = self.attention[1](self.embedding(shifted), causal=True)
        x = self.attention[0](x, encoded)
        logits = x @ self.embedding.weight.T
        return F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


class Rotary(Model):
    """Tables in buffers, sliced to the length; the loss weighs tokens."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(128.0), 10.0 ** -torch.arange(4.0))
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def rotate(self, x):
        a, b = x.chunk(2, -1)
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]
        return x * cos + torch.cat((-b, a), -1) * sin

    def forward(self, tokens):
        x = self.embedding(tokens)
        q, k, v = (heads(y) for y in (*self.attention[0].kv(x).chunk(2, -1), x))
        out = F.scaled_dot_product_attention(
            self.rotate(q), self.rotate(k), v, is_causal=True
        )
        logits = self.head(x + out.transpose(1, 2).flatten(2))
        losses = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        weights = torch.linspace(0, 1, losses.shape[0]).to(losses)
        return (losses * weights).sum() / weights.sum()


class NewZeros(Model):
    """Writes into new tensors that have the tokens of others."""

    def forward(self, tokens):
        x = self.attention[0](self.embedding(tokens), causal=True)
        y = x.new_zeros(x.shape)
        y[..., : WIDTH // 2] = x[..., WIDTH // 2 :]
        y[:, 1:] += x[:, :-1]
        y = self.attention[1](y, causal=True)
        z = torch.empty_like(y)
        z.copy_(y)
        z[:, ::2].mul_(0.5)
        return self.head(z).square().mean()


class Patches(Model):
    """An image in patches, a class token, a learned table of positions."""

    shard: ClassVar = {"image": 2}

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 65, WIDTH))

    @staticmethod
    def inputs(seq):
        return {"image": torch.randn(2, 3, seq, 16, dtype=torch.float64)}

    def forward(self, image):
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        x = x + self.positions[:, : x.shape[1]]
        for attention in self.attention:
            x = attention(x)
        return self.head(x[:, 0]).square().mean() + x[:, 1:].mean()


class Experts(Model):
    """Two of four experts per token, and a balance loss over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, tokens):
        x = self.attention[0](self.embedding(tokens), causal=True)
        flat = x.reshape(-1, WIDTH)
        scores = self.router(flat).softmax(-1)
        weights, chosen = scores.topk(2, -1)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            share = ((chosen == number) * weights).sum(-1, keepdim=True)
            y = y + share * expert(flat)
        used = F.one_hot(chosen, 4).sum(1).to(scores).mean(0)
        balance = 4 * (used * scores.mean(0)).sum()
        x = self.attention[1](x + y.view_as(x), causal=True)
        return self.head(x).square().mean() + balance


class IndexedExperts(Experts):
    """The tokens of an expert are gathered and scattered by index."""

    def forward(self, tokens):
        x = self.attention[0](self.embedding(tokens), causal=True)
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        order = chosen.flatten().argsort(stable=True)
        rows = order // 2
        y = torch.zeros_like(flat)
        picked = flat[rows] * weights.flatten()[order].unsqueeze(-1)
        y = y.index_add(0, rows, self.experts[0](picked))
        x = self.attention[1](x + y.view_as(x), causal=True)
        return self.head(x).square().mean()


class Pooled(Model):
    """Pools at the largest id, as CLIP does, and over all tokens."""

    def forward(self, tokens):
        x = self.attention[0](self.embedding(tokens), causal=True)
        last = x[torch.arange(x.shape[0]), tokens.argmax(-1)]
        return self.head(last + x.mean(1) + x.amax(1)).square().mean()


MODELS = {
    cls.__name__: cls
    for cls in (
        EncoderDecoder, Rotary, NewZeros, Patches, Experts, IndexedExperts, Pooled,
    )
}  # fmt: skip


DOORS = [
    (name, door)
    for name in MODELS
    for door in ("plain", "dtensor")
    # torch itself cannot trace a convolution of a DTensor with other parts than it has.
    if (name, door) != ("Patches", "dtensor")
]


@pytest.mark.parametrize(("seq", "world"), [(32, 2), (20, 3)])
@pytest.mark.parametrize(("name", "door"), DOORS)
@on_ranks("world")
def test_a_model_equals_one_process(name, seq, world, door):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    inputs = model.inputs(seq)
    options = {"shard": model.shard} if door == "plain" else {}
    dims = [model.shard[n] for n in inputs]
    found = compare_calls(model, [inputs.values()], world, door, dims, **options)
    found.check()
    assert all(found.rewritten), "every call is context parallel"
