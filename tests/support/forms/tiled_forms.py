"""Models whose large values are token-wise, and look-alikes that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BATCH, TOKENS, WIDTH, WORDS, HIDDEN = 2, 192, 8, 160, 64

Loss = Callable[["Model", Tensor, Tensor], Any]


class Model(nn.Module):
    """An MLP beside a residual stream, a norm, and a head."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.wide = nn.BatchNorm1d(WORDS)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.loss(self, x, labels)

    def logits(self, x: Tensor) -> Tensor:
        """[B, S, V]"""
        logits: Tensor = self.head(self.norm(x))
        return logits


def example(dtype: torch.dtype = torch.float64) -> tuple[Model, Tensor, Tensor]:
    """A model without a loss yet, an input [B, S, D] and labels [B, S]."""
    torch.manual_seed(0)
    model = Model(lambda *_: None).to(dtype)
    x = torch.randn(BATCH, TOKENS, WIDTH, dtype=dtype)
    labels = torch.randint(0, WORDS, (BATCH, TOKENS))
    labels[:, :3] = -100
    labels[1, 140:] = -100
    return model, x, labels


def _flat(m: Model, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return m.logits(x).flatten(0, 1), labels.flatten()


def plain(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*_flat(m, x, labels))


def upcast(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits, labels = _flat(m, x, labels)
    return F.cross_entropy(
        logits.to(torch.promote_types(x.dtype, torch.float32)), labels
    )


def summed(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(*_flat(m, x, labels), reduction="sum")
    return loss / (labels != -100).sum()


def smoothed(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*_flat(m, x, labels), label_smoothing=0.1)


def weighted(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, WORDS, dtype=x.dtype)
    return F.cross_entropy(*_flat(m, x, labels), weight=weight)


def by_token(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(*_flat(m, x, labels), reduction="none")
    return (losses * torch.linspace(0, 1, len(losses), dtype=x.dtype)).sum()


def z_loss(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits, flat = _flat(m, x, labels)
    extra = torch.logsumexp(logits, -1).square().mean()
    return F.cross_entropy(logits, flat) + 1e-2 * extra


def capped(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits, labels = _flat(m, x, labels)
    return F.cross_entropy(5 * torch.tanh(logits / 5), labels)


def binary(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    wanted = F.one_hot(labels.clamp(min=0), WORDS).to(x.dtype)
    return F.binary_cross_entropy_with_logits(m.logits(x), wanted)


def distilled(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    teacher = m.logits(x.flip(-1)).detach().softmax(-1)
    return -(teacher * m.logits(x).log_softmax(-1)).sum(-1).mean()


def returned(m: Model, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = m.logits(x)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def two_losses(m: Model, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits, labels = _flat(m, x, labels)
    return F.cross_entropy(logits, labels), torch.logsumexp(logits, -1).mean()


def log_probabilities(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    """As GRPO has it: words are picked, and tokens weighted."""
    found = m.logits(x).log_softmax(-1)
    found = found.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    counts = (labels >= 0).to(x.dtype)
    return -(torch.exp(found - found.detach()) * counts).sum() / counts.sum()


def mlp(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    return (x + m.down(F.gelu(m.up(m.norm(x))))).square().mean()


def gated_mlp(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    y = m.norm(x)
    return (x + m.down(F.silu(m.gate(y)) * m.up(y))).square().mean(-1).cumsum(-1).sum()


def fused_mlp(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    both = F.linear(m.norm(x), torch.cat([m.up.weight, m.gate.weight]))
    one, other = both.chunk(2, -1)
    return (x + m.down(F.silu(one) * other)).cumsum(1).square().mean()


def dropped_mlp(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    return (x + m.down(F.dropout(F.gelu(m.up(x)), 0.3))).cumsum(1).square().mean()


def checkpointed_mlp(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    def layer(x: Tensor) -> Tensor:
        return x + m.down(F.gelu(m.up(m.norm(x))))

    for _ in range(2):
        x = checkpoint(layer, x, use_reentrant=False).cumsum(1)
    return x.square().mean()


def both(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    x = x + m.down(F.silu(m.gate(m.norm(x))) * m.up(m.norm(x)))
    return plain(m, x.cumsum(1), labels)


def pooled(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    """As classifiers end: what follows gives several gradients at once."""
    x = x + m.down(F.gelu(m.up(x)))
    return m.norm(x.mean(1)).square().sum()


AT_ONCE: tuple[Loss, ...] = (
    plain, upcast, summed, smoothed, weighted, z_loss, capped, binary, distilled,
    log_probabilities,
)  # fmt: skip
AGAIN: tuple[Loss, ...] = (
    two_losses, mlp, pooled, gated_mlp, fused_mlp, checkpointed_mlp,
)  # fmt: skip


# Look-alikes: what is large is not token-wise.


def over_tokens(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    return m.logits(x).softmax(1).square().sum()


def along_tokens(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    return m.logits(x).cumsum(1).cos().sum()


def batch_norm(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(m.wide(_flat(m, x, labels)[0]), labels.flatten())


def convolved(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    kernel = m.head.weight.t()[:, :, None].expand(-1, -1, 3).transpose(0, 1)
    return F.conv1d(x.transpose(1, 2), kernel.contiguous()).tanh().sum()


# and the calls that no tile may have
TWINS: dict[Loss, tuple[str, ...]] = {
    over_tokens: ("amax", "softmax"),
    along_tokens: ("cumsum",),
    batch_norm: ("var_mean", "batch_norm"),
    convolved: ("convolution",),
}
