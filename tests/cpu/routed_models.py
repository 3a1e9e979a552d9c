"""Mixtures of experts, as models write them: each routes its tokens in another way."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.cpu.programs import WIDTH, Base, attend

EXPERTS, HIDDEN, CHOSEN = 4, 24, 2


class Routed(Base):
    """Two experts per token, out of four; subclasses say how they are computed."""

    chosen = CHOSEN

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def after(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        probabilities = self.gate(flat).softmax(-1)
        weights, ids = probabilities.topk(self.chosen, dim=-1)
        y = x + self.experts(flat, weights, ids).view_as(x)
        return y.square().mean() + 0.1 * self.auxiliary(probabilities, ids)

    def auxiliary(self, probabilities: Tensor, ids: Tensor) -> Tensor:
        counts = torch.histc(ids.flatten().float(), bins=EXPERTS, min=0, max=EXPERTS)
        return (counts / ids.numel() * probabilities.mean(0)).sum()

    def experts(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Sorted rows, brought back by the inverse permutation."""
        keys, order = torch.sort(ids.reshape(-1))
        rows = self.grouped(x[order // self.chosen], keys)
        rows = rows * weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        return rows[back].view(-1, self.chosen, WIDTH).sum(1)

    def grouped(self, rows: Tensor, keys: Tensor) -> Tensor:
        hidden = torch.bmm(rows.unsqueeze(1), self.up[keys]).relu()
        return torch.bmm(hidden, self.down[keys]).squeeze(1) + self.bias[keys]


class GroupedProduct(Routed):
    """torch's own product of rows and the matrices of their experts."""

    def grouped(self, rows: Tensor, keys: Tensor) -> Tensor:
        if rows.dtype == torch.float64:  # the exact result, of what has no such product
            hidden = F.silu(torch.bmm(rows.unsqueeze(1), self.up[keys]))
            return torch.bmm(hidden, self.down[keys]).squeeze(1) + self.bias[keys]
        counts = torch.histc(keys.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        up, down = (
            self.up.bfloat16(),
            self.down.bfloat16(),
        )  # the only dtype it compiles
        hidden = F.silu(F.grouped_mm(rows.bfloat16(), up, offs=ends))
        return F.grouped_mm(hidden, down, offs=ends).float() + self.bias[keys]


class IndexAdd(Routed):
    """Rows are added where their tokens are; the keys are looked up."""

    def experts(self, x, weights, ids):
        keys = ids.flatten()
        order = torch.argsort(keys, stable=True)
        tokens = order.div(self.chosen, rounding_mode="floor")
        rows = self.grouped(x.index_select(0, tokens), keys[order])
        rows = rows * weights.flatten()[order][:, None]
        return torch.zeros_like(x).index_add_(0, tokens, rows)


class ScatterAdd(Routed):
    """Expanded positions, and counts by scatter_add of a weight per token."""

    def experts(self, x, weights, ids):
        keys, order = ids.view(-1).sort(stable=True)
        tokens = (order // self.chosen).reshape(-1, 1).expand(-1, WIDTH)
        rows = self.grouped(torch.gather(x, 0, tokens), keys)
        rows = rows * weights.reshape(-1)[order].reshape(-1, 1)
        made = torch.zeros(x.shape[0], WIDTH, dtype=x.dtype)
        return made.scatter_add(0, tokens, rows)

    def auxiliary(self, probabilities, ids):
        each = 0.5 + torch.arange(ids.shape[0]) % 7 / 7.0
        each = each.repeat_interleave(self.chosen)
        counts = torch.zeros(EXPERTS).scatter_add_(0, ids.reshape(-1), each)
        return (counts / each.sum() * probabilities.mean(0)).sum()


class Back(Routed):
    """The way back by a sort of the order, and by an assignment."""

    def experts(self, x, weights, ids):
        keys, order = torch.sort(ids.reshape(-1))
        rows = self.grouped(x[order // self.chosen], keys)
        first = rows[order.argsort()].view(-1, self.chosen, WIDTH)
        second = torch.zeros(rows.shape[0], WIDTH, dtype=x.dtype)
        second[order] = rows
        both = first + second.view(-1, self.chosen, WIDTH)
        return (both * weights.unsqueeze(-1)).sum(1)


class Batched(Routed):
    """A matrix per row, without any order."""

    def experts(self, x, weights, ids):
        rows, keys = x.repeat_interleave(self.chosen, dim=0), ids.reshape(-1)
        out = self.grouped(rows, keys) * weights.reshape(-1, 1)
        return out.view(-1, self.chosen, WIDTH).sum(1)


class Switch(Routed):
    """One expert per token."""

    chosen = 1

    def auxiliary(self, probabilities, ids):
        used = F.one_hot(probabilities.argmax(-1), EXPERTS).float()
        return EXPERTS * (used.mean(0) * probabilities.mean(0)).sum()


class Dense(Routed):
    """All experts for every token, and a mask; groups of experts are chosen first."""

    def experts(self, x, weights, ids):
        chosen = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype)
        chosen = chosen.scatter_(1, ids, weights)
        best = chosen.view(-1, 2, EXPERTS // 2).amax(-1).topk(1, dim=-1)[1]
        groups = torch.zeros(x.shape[0], 2, dtype=x.dtype).scatter_(1, best, 1.0)
        chosen = chosen * groups.repeat_interleave(EXPERTS // 2, dim=1)
        hidden = torch.einsum("tw,ewh->teh", x, self.up).relu()
        return torch.einsum("teh,ehw,te->tw", hidden, self.down, chosen)


class Checkpointed(Routed):
    """Inside of an activation checkpoint."""

    def experts(self, x, weights, ids):
        return checkpoint(super().experts, x, weights, ids, use_reentrant=False)


class Unflattened(Routed):
    """Numbers of experts as [B, S, k], which are flattened at once."""

    def after(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(self.chosen, dim=-1)
        y = self.experts(x.reshape(-1, WIDTH), weights, ids)
        return (x + y.view_as(x)).square().mean()


class Twice(Routed):
    """Two layers, the second of which routes what the first gives."""

    def after(self, x):
        y = super().experts
        flat = x.reshape(-1, WIDTH)
        for _ in range(2):
            weights, ids = self.gate(flat).topk(self.chosen, dim=-1)
            flat = flat + y(flat, weights.sigmoid(), ids)
        return flat.view_as(x).square().mean()


class TokensMeet(Routed):
    """Looks routed, and is not: what is sorted depends on all tokens."""

    def experts(self, x, weights, ids):
        order = torch.argsort(ids.reshape(-1))
        rows = x[order // self.chosen]
        rows = rows.cumsum(0) + rows.flip(0)  # neighbours in the order
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        return rows[back].view(-1, self.chosen, WIDTH).sum(1)


class UsedExperts(Routed):
    """An auxiliary loss of which experts are used, by whatever rank."""

    def auxiliary(self, probabilities, ids):
        counts = torch.histc(ids.flatten().float(), bins=EXPERTS, min=0, max=EXPERTS)
        return (counts.to(torch.bool).sum() + (counts > 1).float()).mean() * (
            probabilities.mean()
        )


class WeightedCounts(Routed):
    """Counts of weights that tokens have, as Mixtral's loss under a mask."""

    def auxiliary(self, probabilities, ids):
        of_token = (probabilities.detach().amax(-1) > 0.3).to(probabilities.dtype)
        counts = torch.zeros(EXPERTS, dtype=of_token.dtype).scatter_add_(
            0, ids.reshape(-1), of_token.repeat_interleave(self.chosen)
        )
        sums = (probabilities * of_token.unsqueeze(-1)).sum(0)
        return (counts / of_token.sum() * sums).sum()


class CountedTwice(Routed):
    """The numbers that are counted are places in another sum."""

    def auxiliary(self, probabilities, ids):
        flat = ids.reshape(-1)
        counts = torch.histc(flat.float(), bins=EXPERTS, min=0, max=EXPERTS)
        each = probabilities.detach().amax(-1).repeat_interleave(self.chosen)
        sums = torch.zeros(EXPERTS, dtype=each.dtype).scatter_add_(0, flat, each)
        return (counts * sums / (counts * sums).sum() * probabilities.mean(0)).sum()


class Capacity(Routed):
    """Only so many tokens per expert: which ones depends on the others."""

    def experts(self, x, weights, ids):
        used = F.one_hot(ids, EXPERTS)
        rank = used.flatten(0, 1).cumsum(0).view_as(used) * used
        keep = ((rank > 0) & (rank <= x.shape[0] // 3)).any(-1)
        return Batched.experts(self, x, weights * keep, ids)


ROUTED = {
    cls.__name__: cls
    for cls in (
        Routed, GroupedProduct, IndexAdd, ScatterAdd, Back, Batched, Switch, Dense,
        Checkpointed, Unflattened, Twice, TokensMeet, UsedExperts,
        WeightedCounts, CountedTwice, Capacity,
    )
}  # fmt: skip


class EveryExpert(nn.Module):
    """Every expert gets every token, weighted, as in Llama 4."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, WIDTH, 12))
        self.down = nn.Parameter(torch.randn(4, 6, WIDTH))

    def forward(self, x):
        rows = attend(x).reshape(-1, WIDTH)
        scores = self.router(rows)
        best, chosen = scores.topk(2, 1)
        scores = torch.full_like(scores, -torch.inf).scatter_(1, chosen, best).sigmoid()
        repeated = rows.repeat(4, 1) * self.flat(scores)
        gate, up = torch.bmm(repeated.view(4, -1, WIDTH), self.up).chunk(2, dim=-1)
        made = torch.bmm(up * F.silu(gate), self.down).view(-1, WIDTH)
        made = self.between(made.reshape(4, -1, WIDTH))
        return x + made.sum(0).view(x.shape)

    def flat(self, scores):
        return scores.transpose(0, 1).reshape(-1, 1)

    def between(self, made):
        return made
