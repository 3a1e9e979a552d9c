"""Models that take tokens apart: slices, shifts, picks and joined sequences."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

WORDS, CHANNELS, HEADS = 48, 16, 2
PADDING = 0  # an id


class Model(nn.Module):
    """One attention over embedded ids [B, S], and what `head` makes of it."""

    def __init__(self, head: Callable[[Model, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, CHANNELS)
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.out = nn.Linear(CHANNELS, CHANNELS)
        self.mix = nn.Linear(CHANNELS, CHANNELS)
        self.logits = nn.Linear(CHANNELS, WORDS, bias=False)
        self.score = nn.Linear(CHANNELS, 1)
        self.registers = nn.Parameter(torch.randn(1, 3, CHANNELS))
        self.head = head

    def attend(self, x: Tensor, is_causal: bool = True) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return x + self.out(y.transpose(1, 2).flatten(2))

    def forward(self, ids: Tensor) -> Tensor:
        result = self.head(self, self.attend(self.embed(ids)), ids)
        if result.ndim == 0:
            return result
        # Nothing but a number leaves the graph: results would be gathered.
        weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype)
        return (result.sin() * weights.view(result.shape)).sum()


def policy_loss(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    """As GRPO has it, with a mask of the completion."""
    log_probs = m.logits(x)[:, :-1].log_softmax(-1)
    log_probs = log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    counts = (ids[:, 1:] > WORDS // 4).to(log_probs.dtype)
    ratio = torch.exp(log_probs - log_probs.detach())
    return -(ratio * counts).sum() / counts.sum()


def entropy(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    log_probs = m.logits(x)[:, :-1].log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1).mean()


def next_tokens(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    """Multi-token prediction, as DeepSeek-V3 has it."""
    later = torch.roll(m.embed(ids), -1, 1)
    y = m.attend(m.mix(x + later))
    return F.cross_entropy(m.logits(y)[:, :-2].flatten(0, 1), ids[:, 2:].flatten())


def draft(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    """Steps of a draft model are unrolled, as by EAGLE-3."""
    later, loss = m.embed(ids), x.new_zeros(())
    for _ in range(2):
        later = torch.cat([later[:, 1:], torch.zeros_like(later[:, :1])], 1)
        x = m.attend(m.mix(x + later))
        loss = loss + F.cross_entropy(m.logits(x).transpose(1, 2), ids)
    return loss


def shifted_by_writes(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    return m.attend(x + y)


def registers_written(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    y = x.clone()
    y[:, :3] = m.registers
    y[:, -2:] = 0.5
    y[:, 5] = m.registers[0, 0]
    y[:, -4] = 0.25
    y[:, 7] = x[:, 8]
    return m.attend(y)


def registers_joined(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    y = torch.cat([m.registers.expand(len(x), -1, -1), x], 1)
    y = m.attend(y, is_causal=False)
    return y[:, 3:] * y[:, :1]


def hidden_tokens(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    y = m.mix(x)
    y[:, :3] = float("-inf")
    return y.exp() * F.pad(x[:, 1:], (0, 0, 0, 1), value=float("-inf")).exp()


def flags(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    """Picks of booleans and integers."""
    positive, whole = x > 0, (3 * x.sum(-1)).to(torch.int64)
    return positive[:, -1].where(whole[:, :1] > 1, ~positive[:, -1]) * x.mean(1)


def last_valid(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    """As reward models and classifiers read it."""
    last = (ids != PADDING).sum(1) - 1
    return m.score(x).squeeze(-1)[torch.arange(len(x)), last]


def gathered(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    places = ids[:, :5] % x.shape[1]
    return x.gather(1, places.unsqueeze(-1).expand(-1, -1, CHANNELS))


def masked_mean(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    counts = (ids != PADDING).unsqueeze(-1).to(x.dtype)
    return (x * counts).sum(1) / counts.sum(1)


def written(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    """Registers are written at positions that are data, from the end, too."""
    at = torch.stack([ids.argmax() * 0 + 7, torch.tensor(-2), ids.argmin() * 0])
    y = x.clone()
    y[:, at] = m.registers
    y[0, at[:2] + 1] *= 3.0
    return m.attend(y.index_fill(1, at[:1] + 2, 0.5))


def written_by_row(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    """Each sequence has its own positions; a number of some is added to some."""
    at = ids.argsort(dim=1, stable=True)[:, :3]
    rows = torch.arange(len(ids)).unsqueeze(1)
    y = x.index_put((rows, at), m.registers)
    y = y.index_put((rows, at[:, 1:] * 0 + 4), m.mix(x[:, 5:7]), accumulate=True)
    return m.attend(y)


def deeper(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    """Chosen tokens go through one more layer, as in a mixture of depths."""
    tokens = ids.argsort(dim=1, stable=True)[:, 1:5, None]
    at = tokens.expand(-1, -1, CHANNELS)
    x = x.scatter_add(1, at, m.mix(x.gather(1, at)).tanh())
    first = (tokens[:, :1] * 0 + 9).expand(-1, -1, CHANNELS)
    return m.attend(x.scatter(1, first, 0.25))


def added(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    """Several rows are added to one token, and a range of them is written."""
    at = torch.tensor([6, 6, 2])
    y = x.index_add(1, at, m.registers.expand(len(x), -1, -1))
    y[:, torch.arange(3, 6)] = m.registers
    y[:, at] += m.registers
    return m.attend(y.index_copy(1, at[1:], x[:, 1:3]))


def kept(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    """Numbers are written into flags and integers, in the dtype of these."""
    keep, counts = x > 0, (x * 9).long()
    keep[:, torch.tensor([3, 5])] = 0
    keep[ids > WORDS // 2] = 1
    counts[:, torch.tensor([4])] = 1.7
    return m.attend(torch.where(keep, x, x * 0.3) + counts / 9)


HEADS_OF: dict[str, Callable[[Model, Tensor, Tensor], Tensor]] = {
    "flat loss": lambda m, x, ids: F.cross_entropy(
        m.logits(x)[:, :-1].reshape(-1, WORDS), ids[:, 1:].reshape(-1)
    ),
    "policy loss": policy_loss,
    "entropy": entropy,
    "last logits": lambda m, x, ids: m.logits(x[:, -7:]),
    "next tokens": next_tokens,
    "draft": draft,
    "shift by writes": shifted_by_writes,
    "shift by pad": lambda m, x, ids: m.attend(x + F.pad(x, (0, 0, 1, -1))),
    "difference": lambda m, x, ids: x.diff(dim=1),
    "every second": lambda m, x, ids: m.attend(x[:, ::2]),
    "backwards": lambda m, x, ids: m.attend(x.flip(1)),
    "narrow": lambda m, x, ids: m.attend(x.narrow(1, 3, x.shape[1] - 5)),
    "parts": lambda m, x, ids: torch.cat(
        [
            m.attend(part) * (i + 1)
            for i, part in enumerate(x.split([9, len(x[0]) - 9], 1))
        ],
        1,
    ),
    "registers written": registers_written,
    "registers joined": registers_joined,
    "twice": lambda m, x, ids: m.attend(torch.cat([x[:, :9], x], 1))[:, 9:],
    "written tokens": written,
    "tokens written by row": written_by_row,
    "deeper tokens": deeper,
    "added tokens": added,
    "rows added": lambda m, x, ids: m.attend(
        x.index_add(1, torch.tensor([20, 3, 50]), m.registers.expand(len(x), -1, -1))
    ),
    "kept tokens": kept,
    "hidden tokens": hidden_tokens,
    "last valid token": last_valid,
    "class token": lambda m, x, ids: m.score(x[:, 0]),
    "middle token": lambda m, x, ids: m.score(x[:, x.shape[1] // 2]),
    "chosen tokens": lambda m, x, ids: x[:, torch.tensor([0, 3, -2])],
    "gathered tokens": gathered,
    "masked mean": masked_mean,
}


EXCHANGED = {"flags": flags}
"""Where so much is picked, tokens may be exchanged for channels or rows."""


def make(name: str) -> Callable[[], Model]:
    """A function that makes the model of a head."""
    return lambda: Model((HEADS_OF | EXCHANGED)[name])


def ids_of(batch: int, tokens: int) -> Tensor:
    """Token ids; the last ones of each row are padding."""
    ids = torch.randint(1, WORDS, (batch, tokens))
    for row in range(batch):
        ids[row, tokens - 1 - 3 * (row % 2) :] = PADDING
    return ids
