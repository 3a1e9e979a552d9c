"""Models of equal blocks, and of blocks of which one is not quite equal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LAYERS, WIDTH, HEADS, TOKENS, WORDS = 5, 16, 4, 24, 32


@dataclass(frozen=True)
class Kind:
    """A model.

    dropout, attention_dropout: probabilities. tied: all blocks have one weight.
    checkpointed: blocks run again in the backward. writes: each block writes a buffer.
    odd: what is different in one block, if anything. rotary: positions enter blocks.
    no_softmax: of attention.
    """

    dropout: float = 0.0
    attention_dropout: float = 0.0
    tied: bool = False
    checkpointed: bool = False
    writes: bool = False
    rotary: bool = False
    odd: str = ""
    no_softmax: bool = False


class Block(nn.Module):
    """Attention and a perceptron; `is_odd` if it is the block that differs."""

    def __init__(self, kind: Kind, is_odd: bool) -> None:
        super().__init__()
        self.kind = kind
        self.odd = kind.odd if is_odd else ""
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        if self.kind.rotary:
            places = torch.arange(x.shape[1], device=x.device)[:, None]
            angles = places * torch.arange(1, 1 + q.shape[-1]).to(x.dtype)
            q, k = q * angles.cos(), k * angles.cos()
        y = self.attend(q, k, v)
        x = x + y.transpose(1, 2).flatten(2) * (0.5 if self.odd == "constant" else 0.25)
        hidden = F.gelu(self.up(self.norm_2(x)))
        if self.odd == "dtype":
            hidden = hidden.bfloat16().to(x.dtype)
        elif self.kind.odd == "dtype":
            hidden = hidden.float().to(x.dtype)
        if self.odd == "call":
            hidden = hidden.neg()
        hidden = F.dropout(hidden, self.kind.dropout)
        if self.kind.writes:
            self.seen.mul_(0.9).add_(x.detach().mean((0, 1)))
        return x + self.down(hidden)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kind.no_softmax:
            return (q @ k.mT).sigmoid() @ v
        p = self.kind.attention_dropout
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)


class Model(nn.Module):
    """The loss of predicting labels [B, S] of tokens [B, S]."""

    def __init__(self, kind: Kind, layers: int = LAYERS) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(WORDS, WIDTH)
        middle = layers // 2
        self.blocks = nn.ModuleList(Block(kind, i == middle) for i in range(layers))
        if kind.tied:
            for block in self.blocks:
                block.down.weight = self.blocks[0].down.weight
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            if self.kind.odd == "operand" and i == len(self.blocks) // 2:
                x = x + self.embedding(tokens)
            if self.kind.checkpointed:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def new_model(kind: Kind, layers: int = LAYERS) -> Model:
    """In float64, the same on every rank."""
    torch.manual_seed(0)
    return Model(kind, layers).double()


def two_steps(call: nn.Module, model: nn.Module) -> dict[str, Tensor]:
    """Losses, gradients and buffers; the second step sees what the first wrote."""
    torch.manual_seed(1)
    found = {}
    for number in range(2):
        text = torch.randint(WORDS, (2, TOKENS + 1))
        model.zero_grad()
        loss = call(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        loss.backward()
        found[f"loss {number}"] = loss.detach()
        for name, x in model.named_parameters():
            found[f"grad of {name} {number}"] = x.grad.clone()
        for name, x in model.named_buffers():
            found[f"{name} {number}"] = x.clone()
    return found
