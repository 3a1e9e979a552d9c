"""Attention whose keys a small network chooses for every query, in small."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, CHOSEN = 32, 2, 5


class Indexed(nn.Module):
    """Attention to the keys whose scores, of an indexer with few heads, are highest.

    form: how the scores of every query and key are computed.
    """

    def __init__(self, form: str = "heads", width: int = WIDTH) -> None:
        super().__init__()
        self.form = form
        self.qkv = nn.Linear(width, 3 * width)
        self.index_q = nn.Linear(width, HEADS * 8)
        self.index_k = nn.Linear(width, 8)
        self.norm = nn.LayerNorm(8)
        self.index_weights = nn.Linear(width, HEADS)

    def scores(self, x):
        """[B, S, S]"""
        q = self.index_q(x).unflatten(-1, (HEADS, 8))
        k = self.norm(self.index_k(x))
        weights = self.index_weights(x)
        if self.form == "one head":
            return q.mean(2) @ k.mT
        if self.form == "einsum":
            scores = torch.einsum("bshd,btd->bsht", q, k).relu()
            return torch.einsum("bsht,bsh->bst", scores, weights)
        if self.form == "heads first":
            scores = (q.transpose(1, 2) @ k.mT.unsqueeze(1)).relu()
            return (scores * weights.transpose(1, 2).unsqueeze(-1)).sum(1)
        scores = torch.matmul(q, k.transpose(-1, -2).unsqueeze(1)).relu()
        return torch.matmul(weights.unsqueeze(-2), scores).squeeze(-2)

    def mask(self, x):
        """[B, 1, S, S], True where a query sees a key."""
        scores, tokens = self.scores(x), x.shape[1]
        late = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
        chosen = scores.masked_fill(late, -torch.inf).topk(CHOSEN, -1).indices
        hidden = chosen.new_ones(scores.shape, dtype=torch.bool)
        return ~(hidden.scatter(-1, chosen, False) | late).unsqueeze(1)

    def forward(self, x):
        q, k, v = (
            y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x))
        return x + y.transpose(1, 2).flatten(2)


class ScoresOfBlocks(Indexed):
    """Blocks of keys are chosen by their means, and with them all of their keys."""

    BLOCK = 4

    def mask(self, x):
        tokens = x.shape[1] // self.BLOCK * self.BLOCK
        blocks = x[:, :tokens].reshape(len(x), -1, self.BLOCK, x.shape[-1]).mean(2)
        scores = self.index_q(x) @ self.index_k(blocks).repeat(1, 1, HEADS).mT
        first = torch.arange(scores.shape[-1], device=x.device) * self.BLOCK
        here = torch.arange(x.shape[1], device=x.device)
        late = first > here[:, None]
        chosen = scores.masked_fill(late, -torch.inf).topk(2, -1).indices
        bias = torch.full_like(scores, -torch.inf).scatter(-1, chosen, 0.0)
        bias = bias.repeat_interleave(self.BLOCK, -1)
        bias = F.pad(bias, (0, x.shape[1] - tokens), value=-torch.inf)
        keys = torch.arange(x.shape[1], device=x.device)
        near = (here[:, None] - keys < self.BLOCK) & (keys <= here[:, None])
        return (
            bias.masked_fill(near, 0.0)
            .masked_fill(keys > here[:, None], -torch.inf)
            .unsqueeze(1)
        )


class Compressed(nn.Module):
    """Attention to near keys, and to weighted sums of windows that overlap."""

    RATE = 4

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 8)
        self.parts = nn.Linear(width, 2 * 8)
        self.gates = nn.Linear(width, 2 * 8)
        self.position = nn.Parameter(torch.randn(self.RATE, 2 * 8))
        self.out = nn.Linear(width, width)

    def sums(self, x):
        """[B, windows, 8]"""
        batch, tokens, _ = x.shape
        windows = tokens // self.RATE
        shape = (batch, windows, self.RATE, -1)
        parts = self.parts(x)[:, : windows * self.RATE].view(shape)
        gates = self.gates(x)[:, : windows * self.RATE].view(shape) + self.position
        values = parts.new_zeros((batch, windows, 2 * self.RATE, 8))
        weights = gates.new_full(values.shape, -torch.inf)
        values[:, :, self.RATE :] = parts[..., 8:]
        weights[:, :, self.RATE :] = gates[..., 8:]
        values[:, 1:, : self.RATE] = parts[:, :-1, :, :8]
        weights[:, 1:, : self.RATE] = gates[:, :-1, :, :8]
        return (values * weights.softmax(2)).sum(2)

    def forward(self, x):
        batch, tokens, _ = x.shape
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        near, sums = self.kv(x), self.sums(x)
        windows = sums.shape[1]
        here = torch.arange(tokens, device=x.device)
        past = (here + 1) // self.RATE
        scores = torch.matmul(q.transpose(1, 2), sums.mT.unsqueeze(1)).relu().sum(2)
        late = torch.arange(windows, device=x.device) >= past[:, None]
        chosen = scores.masked_fill(late, -torch.inf).topk(2, -1).indices
        chosen = torch.where(chosen >= past[:, None], windows, chosen)
        bias = sums.new_full((batch, 1, tokens, windows + 1), -torch.inf)
        bias.scatter_(-1, chosen.unsqueeze(1), 0.0)
        window = (here[:, None] >= here) & (here[:, None] - here < 8)
        own = torch.where(window, 0.0, -torch.inf).to(x.dtype)
        own = own.expand(batch, 1, -1, -1)
        k = torch.cat([near, sums], 1).unsqueeze(1)
        y = F.scaled_dot_product_attention(
            q, k, k, attn_mask=torch.cat([own, bias[..., :-1]], -1), enable_gqa=True
        )
        return self.out(y.transpose(1, 2).flatten(2))


MODULES = {
    "heads": Indexed,
    "einsum": lambda: Indexed("einsum"),
    "one head": lambda: Indexed("one head"),
    "heads first": lambda: Indexed("heads first"),
    "blocks": ScoresOfBlocks,
    "compressed": Compressed,
}


class ScoredByProducts(nn.Module):
    """Products for every token, all with gradients, and the best scores of keys."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.attend = Indexed("one head")
        self.weight = nn.Parameter(torch.randn(2, 1, 8, 8))
        self.keys = nn.Linear(width, 8)

    def forward(self, x):
        y = self.attend(x).unflatten(-1, (4, 8))
        y = torch.matmul(y, self.weight[: len(x)])
        y = torch.einsum("bshd,bshe->bsde", y, y.tanh())
        y = torch.matmul(y, y.mT).mean(2)
        keys = self.keys(x)
        scores = torch.matmul(y.unsqueeze(2), keys.mT.unsqueeze(1)).squeeze(2)
        return scores.topk(CHOSEN, -1).values


MODULES["products"] = ScoredByProducts
