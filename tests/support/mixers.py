"""Modules that mix tokens by other means than softmax attention: [B, S, C] each."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

HEADS = 4


class Mixer(nn.Module):
    """Queries, keys and values of every token, mixed, and added to x."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(self.mix(q, k, v))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError


def heads(x: Tensor, number: int = HEADS) -> Tensor:
    return x.unflatten(-1, (number, -1))


class LinearAttention(Mixer):
    """Katharopoulos et al., Transformers are RNNs (arXiv 2006.16236)."""

    heads = HEADS

    def mix(self, q, k, v):
        q, k, v = (heads(x, self.heads) for x in (q, k, v))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        states = torch.cumsum(k.unsqueeze(-1) * v.unsqueeze(-2), 1)
        sums = (q * torch.cumsum(k, 1)).sum(-1, keepdim=True)
        return ((q.unsqueeze(-1) * states).sum(-2) / sums).flatten(2)


class SingleHead(LinearAttention):
    """No rank can have a head of its own; channels of values keep apart, too."""

    heads = 1


class Retention(Mixer):
    """Sun et al., Retentive Network (arXiv 2307.08621), by chunks, in a loop."""

    chunk = 4

    def mix(self, q, k, v):
        q, k, v = (heads(x).transpose(1, 2) for x in (q, k, v))
        decay = 1 - 2.0 ** (-2 - torch.arange(HEADS, dtype=q.dtype)).view(-1, 1, 1)
        row = torch.arange(self.chunk, dtype=q.dtype)
        within = (decay ** (row[:, None] - row).clamp(min=0)).tril()
        state, results = q.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]), []
        for q_c, k_c, v_c in zip(
            *(x.split(self.chunk, 2) for x in (q, k, v)), strict=True
        ):
            inside = ((q_c @ k_c.mT) * within) @ v_c
            results.append(inside + (q_c * decay ** (row[:, None] + 1)) @ state)
            after = k_c * decay ** (self.chunk - 1 - row[:, None])
            state = state * decay**self.chunk + after.mT @ v_c
        return torch.cat(results, 2).transpose(1, 2).flatten(2)


class Lightning(Mixer):
    """MiniMax-01 (arXiv 2501.08313): each head has a part of one projection."""

    chunk = 4

    def __init__(self, width: int = 32) -> None:
        super().__init__(width)
        row, rate = torch.arange(self.chunk), 1 - 0.5 ** torch.arange(2.0, 2 + HEADS)
        decay = rate.view(-1, 1, 1) ** (row[:, None] - row).clamp(min=0)
        self.register_buffer("decay", decay.tril())

    def forward(self, x):
        q, k, v = heads(self.qkv(self.norm(x))).transpose(1, 2).chunk(3, -1)
        state, results = q.new_zeros(len(q), HEADS, q.shape[-1], v.shape[-1]), []
        for begin in range(0, q.shape[2], self.chunk):
            end = min(begin + self.chunk, q.shape[2])
            q_c, k_c, v_c = q[:, :, begin:end], k[:, :, begin:end], v[:, :, begin:end]
            decay = self.decay[:, : end - begin, : end - begin]
            results.append((q_c @ k_c.mT * decay) @ v_c + q_c @ state)
            state = state * decay[:, -1:, :1] + k_c.mT @ v_c
        return x + self.out(torch.cat(results, 2).transpose(1, 2).flatten(2))


class WrittenChunks(Mixer):
    """Chunks of results are written into one tensor, as delta rules do."""

    chunk = 4

    def mix(self, q, k, v):
        shape = (HEADS, q.shape[1] // self.chunk, self.chunk, -1)
        q, k, v = (heads(x).transpose(1, 2).reshape(len(x), *shape) for x in (q, k, v))
        state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
        hidden = torch.ones(self.chunk, self.chunk, dtype=torch.bool).triu(1)
        result = torch.zeros_like(v)
        for i in range(q.shape[2]):
            scores = (q[:, :, i] @ k[:, :, i].mT).masked_fill(hidden, 0)
            result[:, :, i] = scores @ v[:, :, i] + q[:, :, i] @ state
            state = state * 0.9 + k[:, :, i].mT @ v[:, :, i]
        return result.flatten(2, 3).transpose(1, 2).flatten(2)


class WrittenTokens(Mixer):
    """Tokens are written into one tensor, as by RecurrentGemma, and it is the result.

    What is read before the last write must not have it.
    """

    def mix(self, q, k, v):
        gate = q.sigmoid()
        state, result = torch.zeros_like(k[:, 0]), torch.zeros_like(k)
        for t in range(k.shape[1]):
            state = gate[:, t] * state + k[:, t]
            result[:, t] = state
            if t == k.shape[1] // 2:
                half = result * 2
        return result * half + v


class LongConvolution(Mixer):
    """Poli et al., Hyena Hierarchy (arXiv 2302.10866): a convolution by FFT."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(width)
        self.filter = nn.Parameter(torch.randn(width, 16) / 8)

    def mix(self, q, k, v):
        size = 2 * q.shape[1]
        value, kernel = (
            torch.fft.rfft(x, n=size) for x in (v.transpose(1, 2), self.filter)
        )
        mixed = torch.fft.irfft(value * kernel, n=size)[..., : q.shape[1]]
        return q * mixed.transpose(1, 2) * k


class Convolved(Mixer):
    """Has a short causal convolution of each channel."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(width)
        self.convolution = nn.Conv1d(width, width, 4, groups=width, padding=3)

    def convolved(self, *given: Tensor) -> list[Tensor]:
        return [
            self.convolution(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
            for x in given
        ]


class ShortConvolutions(Convolved, LinearAttention):
    """Short causal convolutions of each channel before the mixer, as in Mamba."""

    def mix(self, q, k, v):
        return super().mix(*self.convolved(q, k, v))


class AfterStem(LinearAttention):
    """A stem makes one token of two, and normalises them over the batch."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(width)
        self.stem = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.statistics = nn.BatchNorm1d(width)
        self.pool = nn.AvgPool1d(2)

    def forward(self, x):
        return super().forward(self.pool(self.statistics(self.stem(x.mT))).mT)


class LongKernel(Mixer):
    """A convolution with a weight for every token, two channels of each channel."""

    taps = 16

    def __init__(self, width: int = 32) -> None:
        super().__init__(width)
        self.filter = nn.Parameter(torch.randn(2 * width, 1, self.taps) / self.taps)

    def mix(self, q, k, v):
        padded = F.pad(v.transpose(1, 2), (self.taps - 1, 0))
        mixed = F.conv1d(padded, self.filter, groups=v.shape[-1]).transpose(1, 2)
        value, gate = mixed.unflatten(-1, (-1, 2)).unbind(-1)
        return q * value * gate.sigmoid() * k


class MinGRU(Mixer):
    """Feng et al., Were RNNs All We Needed (arXiv 2410.01201), by logarithms."""

    def mix(self, q, k, v):
        kept = torch.cumsum(-F.softplus(q), 1)
        return v * (kept + torch.logcumsumexp(-F.softplus(-q) + k - kept, 1)).exp()


class ConvolvedGRU(Convolved, MinGRU):
    """Short convolutions before a mixer that keeps any number of channels apart."""

    def mix(self, q, k, v):
        return super().mix(*self.convolved(q, k), v)


class GatedScan(Mixer):
    """A gated recurrence, token by token."""

    def mix(self, q, k, v):
        gate, state, states = q.sigmoid(), k[:, 0], []
        for i in range(q.shape[1]):
            state = gate[:, i] * state + (1 - gate[:, i]) * k[:, i]
            states.append(state)
        return torch.stack(states, 1) * v


class NormOverHeads(LinearAttention):
    """Heads are no more independent between two sums over the tokens."""

    def mix(self, q, k, v):
        q, k, v = heads(q), heads(k), heads(v)
        sums = torch.cumsum(k * v, 1)
        sums = sums / (1 + sums.square().sum((2, 3), keepdim=True))
        return (q * torch.cumsum(sums, 1)).flatten(2)


MIXERS = {
    cls.__name__: cls
    for cls in (
        LinearAttention, SingleHead, Retention, Lightning, WrittenChunks,
        WrittenTokens, LongConvolution, ShortConvolutions, AfterStem, LongKernel,
        MinGRU, ConvolvedGRU, GatedScan, NormOverHeads,
    )
}  # fmt: skip
