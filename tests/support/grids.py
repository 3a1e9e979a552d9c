"""Attention within windows, rows and columns of an image, and over all of it."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 32


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, bias=None):
        q, k, v = (
            y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(y.transpose(1, 2).flatten(2))


class Windows(nn.Module):
    """Windows of 4 x 4 tokens of a grid, shifted or not, and global attention.

    x: [B, rows * columns, C]. bias: whether windows add one by position.
    """

    def __init__(self, rows=8, columns=8, shift=0, bias=False):
        super().__init__()
        self.grid, self.shift = (rows, columns), shift
        self.local, self.whole = Attention(), Attention()
        self.bias = nn.Parameter(torch.randn(4, 16, 16)) if bias else None

    def forward(self, x):
        batch, (rows, columns) = x.shape[0], self.grid
        y = x.view(batch, rows, columns, WIDTH)
        if self.shift:
            y = y.roll((-self.shift, -self.shift), (1, 2))
        y = y.view(batch, rows // 4, 4, columns // 4, 4, WIDTH)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, WIDTH)
        y = self.local(y, self.bias)
        y = y.view(batch, rows // 4, columns // 4, 4, 4, WIDTH)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(batch, rows, columns, WIDTH)
        if self.shift:
            y = y.roll((self.shift, self.shift), (1, 2))
        x = x + y.view(x.shape)
        return x + self.whole(x)


class Stages(nn.Module):
    """x: [B, 3, H, W] -> [B, 5]. Patches, windows, a quarter of the tokens, windows."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 2, 2)
        self.first, self.second = Attention(), Attention()
        self.merge, self.out = nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.bias = nn.Parameter(torch.randn(2, 1, 4, 16, 16))

    def windows(self, x):
        batch, rows, columns, width = x.shape
        y = x.view(batch, rows // 4, 4, columns // 4, 4, width).transpose(2, 3)
        return y.reshape(-1, 16, width)

    def attended(self, attention, x, bias):
        batch, rows, columns, width = x.shape
        y = attention(self.windows(x), bias)
        y = y.view(batch, rows // 4, columns // 4, 4, 4, width).transpose(2, 3)
        return y.reshape(x.shape)

    def forward(self, x):
        y = self.patches(x).permute(0, 2, 3, 1)
        y = y + self.attended(self.first, y, self.bias[0])
        corners = [y[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        y = self.merge(torch.cat(corners, -1))
        batch, rows, columns, _ = y.shape
        last = (torch.arange(rows, device=y.device) >= rows - 2)[:, None]
        region = last + 2 * (torch.arange(columns, device=y.device) >= columns - 2)
        region = self.windows(region[None, :, :, None]).squeeze(-1)
        apart = (region[:, :, None] != region[:, None]) * -100.0
        bias = self.bias[1] + apart[:, None].repeat(batch, 1, 1, 1).to(y.dtype)
        z = self.attended(self.second, y.roll((-2, -2), (1, 2)), bias)
        return self.out((y + z.roll((2, 2), (1, 2))).mean((1, 2)))


class Axes(nn.Module):
    """Along rows, then along columns: one of them is in whole on every rank."""

    def __init__(self, rows=8, columns=6):
        super().__init__()
        self.grid = (rows, columns)
        self.of_rows, self.of_columns = Attention(), Attention()

    def forward(self, x):
        batch, (rows, columns) = x.shape[0], self.grid
        y = x.view(batch, rows, columns, WIDTH)
        y = y + self.of_rows(y.reshape(-1, columns, WIDTH)).view(y.shape)
        z = self.of_columns(y.transpose(1, 2).reshape(-1, rows, WIDTH))
        y = y + z.view(batch, columns, rows, WIDTH).transpose(1, 2)
        return y.reshape(x.shape)


class InOneStep(nn.Module):
    """Windows of 6 tokens, made and joined by one view each."""

    def __init__(self):
        super().__init__()
        self.local, self.whole = Attention(), Attention()

    def forward(self, x):
        y = self.local(x.reshape(-1, 6, WIDTH)).view(x.shape)
        return x + y + self.whole(y)


class Frames(nn.Module):
    """Patches of single frames by a convolution; then along places, and along times."""

    def __init__(self, frames=4, rows=8, columns=4):
        super().__init__()
        self.video = (frames, rows, columns)
        self.patches = nn.Conv2d(WIDTH, WIDTH, 2, 2)
        self.of_places, self.of_times = Attention(), Attention()

    def forward(self, x):
        batch, (frames, rows, columns) = x.shape[0], self.video
        y = x.view(batch * frames, rows, columns, WIDTH).permute(0, 3, 1, 2)
        y = self.patches(y).flatten(2).transpose(1, 2)
        y = y + self.of_places(y)
        y = y.view(batch, frames, -1, WIDTH).transpose(1, 2).flatten(0, 1)
        y = y + self.of_times(y)
        return y.view(batch, -1, frames, WIDTH).transpose(1, 2).flatten(1, 2)


MODULES = {
    "windows": (Windows, 64),
    "shifted": (lambda: Windows(shift=2), 64),
    "biased": (lambda: Windows(bias=True), 64),
    "uneven": (lambda: Windows(rows=12), 96),
    "axes": (Axes, 48),
    "one step": (InOneStep, 54),
    "uneven columns": (lambda: Windows(rows=12, columns=12, shift=2), 144),
    "uneven axes": (lambda: Axes(rows=9), 54),
    "frames": (Frames, 128),
}
