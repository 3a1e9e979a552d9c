"""Autograd functions as people write them: writes of all kinds, and fused losses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

WORDS, WIDTH, HEADS = 24, 16, 2
IGNORED = -100


class Writing(torch.autograd.Function):
    """The sum of the squares of x @ w.T, with writes on the way; x is [tokens, C]."""

    @staticmethod
    def forward(ctx, x, w, kind):
        ctx.kind = kind
        y = x @ w.T
        d, half = 2 * y, y.shape[0] // 2 + 1
        if kind == "add_":
            d = torch.zeros_like(d).add_(d)
        elif kind == "copy_":
            d = torch.empty_like(d).copy_(d)
        elif kind == "mul_":
            d.mul_(2.0).mul_(0.5)
        elif kind == "columns":
            e = torch.empty_like(d)
            e[:, :5], e[:, 5:] = d[:, :5], d[:, 5:]
            d = e
        elif kind == "rows":
            e = torch.empty_like(d)
            e[:half], e[half:] = d[:half], d[half:]
            d = e
        elif kind == "one row":
            d[3] *= 2.0
            d[3] *= 0.5
        elif kind == "every other row":
            e = torch.zeros_like(d)
            e[::2] += d[::2]
            e[1::2] += d[1::2]
            d = e
        elif kind == "view":
            d.view(-1, 2, w.shape[0])[:, 1].mul_(3.0)
            d.view(-1, 2, w.shape[0])[:, 1].div_(3.0)
        elif kind == "index_put_":
            e = torch.zeros_like(d)
            e.index_put_((torch.arange(1, half),), d[1:half])
            e.index_put_((torch.tensor([0]),), d[:1])
            e[half:] = d[half:]
            d = e
        elif kind == "scatter_":
            d.scatter_(
                1, torch.zeros_like(d[:, :1], dtype=torch.long), d[:, :1].clone()
            )
        elif kind == "masked_fill_":
            d.masked_fill_(d < 0, 0.0)
        elif kind == "out":
            torch.mul(y, 2.0, out=d)
        dw = d.T @ x
        if kind == "gradient by parts":
            dw = torch.zeros_like(w)
            dw[:8], dw[8:] = d[:, :8].T @ x, d[:, 8:].T @ x
        elif kind == "gradient summed":
            dw = torch.zeros_like(w)
            for i in range(0, y.shape[0], 5):
                dw += d[i : i + 5].T @ x[i : i + 5]
        if kind == "result":
            e = torch.empty_like(y)
            e[:half], e[half:] = y[:half], -y[half:]
            y = e
        ctx.save_for_backward(d, w, dw)
        return y.square().sum()

    @staticmethod
    def backward(ctx, grad):
        d, w, dw = ctx.saved_tensors
        dx = d @ w
        if ctx.kind == "backward rows":
            e = torch.empty_like(dx)
            e[:9], e[9:] = dx[:9], dx[9:]
            dx = e
        elif ctx.kind == "backward mul_":
            return dx.mul_(grad), dw.mul_(grad), None
        return dx * grad, dw * grad, None


WRITES = (
    "none", "add_", "copy_", "mul_", "columns", "rows", "one row", "every other row",
    "view", "index_put_", "scatter_", "masked_fill_", "out", "gradient by parts",
    "gradient summed", "result", "backward rows", "backward mul_",
)  # fmt: skip


@dataclass(frozen=True)
class Loss:
    """A product and a cross entropy in one function.

    chunk: tokens that are computed at a time; 0: all.
    how: how the gradient of a chunk's logits is made of its probabilities.
    joined: how gradients of chunks come together: "write" or "cat".
    """

    chunk: int = 10
    how: str = "scatter_add_"
    joined: str = "write"
    bias: bool = False
    smoothing: float = 0.0
    reduction: str = "mean"
    of_chunk: bool = False


class FusedLoss(torch.autograd.Function):
    """Gradients are made in the forward, chunk by chunk."""

    @staticmethod
    def forward(ctx, x, weight, bias, labels, loss: Loss):
        chunk = loss.chunk or x.shape[0]
        counted = labels != IGNORED
        count = counted.sum() if loss.reduction == "mean" else 1
        total = torch.zeros((), dtype=x.dtype)
        d, parts = torch.empty_like(x), []
        dw, db = torch.zeros_like(weight), torch.zeros_like(weight[:, 0])
        for i in range(0, x.shape[0], chunk):
            own = slice(i, i + chunk)
            if loss.of_chunk:  # every chunk has a mean of its own
                count = counted[own].sum()
            logits = x[own] @ weight.T
            if bias is not None:
                logits += bias
            total += (
                F.cross_entropy(
                    logits,
                    labels[own],
                    reduction="sum",
                    ignore_index=IGNORED,
                    label_smoothing=loss.smoothing,
                )
                / count
            )
            p = logits.softmax(-1)
            words = torch.where(counted[own], labels[own], 0)[:, None]
            if loss.smoothing:
                p -= loss.smoothing / WORDS
            sure = 1.0 - loss.smoothing
            if loss.how == "scatter_add_":
                p.scatter_add_(1, words, torch.full_like(p[:, :1], -sure))
            elif loss.how == "one_hot":
                p = p - sure * (words == torch.arange(WORDS)).to(p.dtype)
            else:  # index_put
                p[torch.arange(p.shape[0]), words[:, 0]] -= sure
            p = p.masked_fill_(~counted[own, None], 0.0).div_(count)
            if loss.joined == "write":
                d[own] = p @ weight
            else:
                parts.append(p @ weight)
            dw.addmm_(p.T, x[own])
            db += p.sum(0)
        if loss.joined == "cat":
            d = torch.cat(parts)
        ctx.has_bias = bias is not None
        ctx.save_for_backward(d, dw, db)
        return total

    @staticmethod
    def backward(ctx, grad):
        d, dw, db = ctx.saved_tensors
        d.mul_(grad)
        return d, dw * grad, db * grad if ctx.has_bias else None, None, None


LOSSES = {
    "scatter_add_": Loss(),
    "one_hot": Loss(how="one_hot"),
    "cat": Loss(joined="cat"),
    "bias": Loss(bias=True),
    "smoothing": Loss(smoothing=0.1),
    "sum": Loss(reduction="sum", how="one_hot"),
    "chunks that divide": Loss(chunk=8),
    "one token left": Loss(chunk=9),
    "all at once": Loss(chunk=0),
    "index_put": Loss(how="index_put"),
    "mean of chunks": Loss(of_chunk=True, chunk=16),
}


class Model(nn.Module):
    """tokens [B, S], labels [B, S] -> a loss by Writing, or by FusedLoss."""

    def __init__(self, kind: str | Loss) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        qkv = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(*qkv.chunk(3, dim=1), is_causal=True)
        y = (x + y.transpose(1, 2).flatten(2)).flatten(0, 1)
        if isinstance(self.kind, str):
            return Writing.apply(y, self.head.weight, self.kind)
        bias = self.head.bias if self.kind.bias else None
        return FusedLoss.apply(y, self.head.weight, bias, labels.flatten(), self.kind)


def batch(length: int, size: int = 2) -> tuple[Tensor, Tensor]:
    """Tokens and labels, some of which do not count."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(WORDS, (size, length), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[:, -1] = labels[0, 2] = IGNORED
    return tokens, labels
