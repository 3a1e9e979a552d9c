"""Small models whose streams of tokens are joined, split, or grow on their way."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

WIDTH, HEADS = 32, 4


def split_heads(x: Tensor) -> Tensor:
    """[B, S, C] -> [B, H, S, D]"""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """[B, H, S, D] -> [B, S, C]"""
    return x.transpose(1, 2).flatten(2)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, C] -> [B, S, C]"""
        return x + self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = Mlp()

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k and v [B, H, S, D]"""
        return tuple(split_heads(part) for part in self.qkv(x).chunk(3, -1))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, C] -> [B, S, C]"""
        q, k, v = self.heads(x)
        return self.mlp(x + join_heads(F.scaled_dot_product_attention(q, k, v)))


class RotaryBlock(Block):
    """EVA: the class token is left out of the rotation of q and k."""

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().heads(x)
        return self.turn(q), self.turn(k), v

    def turn(self, x: Tensor) -> Tensor:
        """[B, H, S, D] -> the same, turned by its positions from the second on."""
        rest = x[:, :, 1:]
        angles = torch.arange(rest.shape[2], device=x.device)[:, None] * 0.1
        turned = rest * angles.cos() + rest.flip(-1) * angles.sin()
        return torch.cat([x[:, :, :1], turned.type_as(x)], 2)


class Vit(nn.Module):
    """An image, its patches, a class token and registers; all tokens are averaged."""

    def __init__(self, block: type[Block] = Block, registers: int = 0) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.extra = nn.Parameter(torch.randn(1, 1 + registers, WIDTH))
        self.blocks = nn.ModuleList([block(), block()])
        self.last = Mlp()

    def forward(self, image: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, C]"""
        x = self.patches(image).flatten(2).transpose(1, 2)
        extra = self.extra.expand(x.shape[0], -1, -1)
        x = torch.cat([extra, x], 1)
        for block in self.blocks:
            x = block(x)
        x = x[:, self.extra.shape[1] :]
        return self.last(x).mean(1)


class JointBlock(nn.Module):
    """SD3: two streams with weights of their own, joined for attention only."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Block(), Block()

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, C], [B, T, C] -> the same"""
        pairs = zip(self.image.heads(image), self.text.heads(text), strict=True)
        q, k, v = (torch.cat(pair, dim=2) for pair in pairs)
        y = join_heads(F.scaled_dot_product_attention(q, k, v))
        y_image, y_text = y[:, : image.shape[1]], y[:, image.shape[1] :]
        return self.image.mlp(image + y_image), self.text.mlp(text + y_text)


class Sd3(nn.Module):
    """Latents [B, C, H, W], and a text that is never joined outside of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.blocks = nn.ModuleList([JointBlock(), JointBlock()])
        self.last = Mlp()

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        """[B, 3, H, W], [B, T, C] -> [B, S, C]"""
        x = self.patches(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x, text = block(x, text)
        return self.last(x)


class Flux(nn.Module):
    """A double block, then a single one on the joined stream, which is then cut."""

    def __init__(self) -> None:
        super().__init__()
        self.joint, self.single = JointBlock(), Block()
        self.last = Mlp()

    def forward(self, latents: Tensor, text: Tensor) -> Tensor:
        """[B, S, C], [B, T, C] -> [B, S, C]"""
        latents, text = self.joint(latents, text)
        x = self.single(torch.cat([text, latents], dim=1))
        return self.last(x[:, text.shape[1] :])


class Split(nn.Module):
    """The joined stream is taken apart by split, and rolled in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = Block(), Block(), Mlp()

    def forward(self, latents: Tensor, text: Tensor) -> Tensor:
        """[B, S, C], [B, T, C] -> [B, S, C]"""
        lengths = [latents.shape[1], text.shape[1]]
        x = self.first(torch.cat([latents, text], 1)).roll(3, 1)
        x = self.second(x).roll(-3, 1)
        latents, text = x.split(lengths, 1)
        return self.last(latents) * text.mean()


def image(batch: int = 2, side: int = 20) -> Tensor:
    return torch.randn(batch, 3, side, side)


def stream(tokens: int) -> Tensor:
    return torch.randn(2, tokens, WIDTH)


# Model, inputs (25 patches and odd texts), and the lengths that attention sees.
MODELS = {
    "class_token": (Vit, lambda: (image(),), [26, 26]),
    "registers": (lambda: Vit(registers=4), lambda: (image(),), [30, 30]),
    "eva": (lambda: Vit(RotaryBlock), lambda: (image(),), [26, 26]),
    "sd3": (Sd3, lambda: (image(), stream(11)), [36, 36]),
    "flux": (Flux, lambda: (stream(25), stream(11)), [36, 36]),
    "split": (Split, lambda: (stream(25), stream(11)), [36, 36]),
}
