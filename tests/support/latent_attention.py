"""Multi-head latent attention in small: keys and values are made of few numbers."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, LATENT, ROPE, NOPE, VALUE = 32, 4, 8, 4, 8, 12
MADE = HEADS * (NOPE + ROPE + VALUE)  # numbers of k and v per token


class LatentAttention(nn.Module):
    """x [B, S, WIDTH] -> the same shape.

    join: how rotated and other parts of a key come together, "cat" or "writes".
    mask: "causal", "documents" or "none".
    """

    def __init__(self, join: str = "cat", mask: str = "causal") -> None:
        super().__init__()
        self.join, self.mask = join, mask
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, HEADS * (NOPE + ROPE))
        self.down = nn.Linear(WIDTH, LATENT + ROPE, bias=False)
        self.latent_norm = nn.RMSNorm(LATENT)
        self.up = nn.Linear(LATENT, HEADS * (NOPE + VALUE))
        self.out = nn.Linear(HEADS * VALUE, WIDTH)

    def rotate(self, x):
        tokens = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)
        angles = tokens[:, None] * torch.tensor([1.0, 0.1], dtype=x.dtype)
        cos, sin = angles.cos(), angles.sin()
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def keys(self, h):
        """Return k [B, HEADS, S, NOPE + ROPE] and v [B, HEADS, S, VALUE]."""
        latent, rope = self.down(h).split([LATENT, ROPE], -1)
        made = self.up(self.latent_norm(latent))
        nope, v = (
            made.unflatten(-1, (HEADS, -1)).transpose(1, 2).split([NOPE, VALUE], -1)
        )
        rope = self.rotate(rope.unsqueeze(1)).expand(-1, HEADS, -1, -1)
        if self.join == "cat":
            return torch.cat((nope, rope), -1), v
        k = nope.new_empty((*nope.shape[:-1], NOPE + ROPE))
        k[..., :NOPE] = nope
        k[..., NOPE:] = rope
        return k, v

    def forward(self, x):
        h = self.norm(x)
        q = self.query(h).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        q_nope, q_rope = q.split([NOPE, ROPE], -1)
        q = torch.cat((q_nope, self.rotate(q_rope)), -1)
        k, v = self.keys(h)
        mask = None
        if self.mask == "documents":
            position = torch.arange(x.shape[1], device=x.device)
            document = position // 7
            mask = (document[:, None] == document) & (position[:, None] >= position)
        causal = self.mask == "causal"
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return x + self.out(y.transpose(1, 2).flatten(2))


class TwoLayers(nn.Module):
    def __init__(self, join: str = "cat", mask: str = "causal") -> None:
        super().__init__()
        self.layers = nn.ModuleList(LatentAttention(join, mask) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
