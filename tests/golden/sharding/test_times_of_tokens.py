"""Every token has a time of its own: what is made of times is cut before weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.golden.capture import capture
from tests.golden.golden_text import assert_golden, lines_with, table
from tests.golden.operands import attend


class Times(nn.Module):
    """Tokens x [B, S, C] that are scaled by what their times t [B, S] say."""

    def __init__(self, is_flat):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.is_flat = is_flat

    def forward(self, x, t):
        t = t.flatten() if self.is_flat else t
        angles = t[..., None].float() * torch.arange(3.0)
        table = torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype)
        scale = self.second(F.silu(self.first(table)))
        return attend(x * scale.view(x.shape[0], -1, 8))


def captured(mesh, is_flat, tokens=60):
    x, t = torch.randn(2, tokens, 8), torch.randint(9, (2, tokens))
    return capture(Times(is_flat), x, t, mesh=mesh, shard={"x": 1})


class OneTime(Times):
    """One time of a whole sequence: what lacks tokens stays whole."""

    def forward(self, x, t):
        return super().forward(x, t[:, :1])


def test_a_table_is_cut(mesh):
    x, t = torch.randn(2, 60, 8), torch.randint(9, (2, 60))
    captures = {
        "times of tokens": captured(mesh, False),
        "one time": capture(OneTime(False), x, t, mesh=mesh, shard={"x": 1}),
    }
    words = ("= cat(", "linear(", "cp_shard(", "cp_unsplit", "cp_pin")
    assert_golden(
        table({n: x.lines(*words) for n, x in captures.items()}),
        """\
times of tokens:
  cp_shard = cp_shard(l_x_, 1)  # [2, 60, 8] S(1)
  cat = cat([sin, cos], -1)  # [2, 60, 6]
  cp_shard_1 = cp_shard(table, 1)  # [2, 60, 6] S(1)
  linear = linear(cp_shard_1, cp_replicate, cp_replicate_1)  # [2, 60, 8] S(1)
  scale = linear(silu, cp_replicate_2, cp_replicate_3)  # [2, 60, 8] S(1)
one time:
  cp_shard = cp_shard(l_x_, 1)  # [2, 60, 8] S(1)
  cat = cat([sin, cos], -1)  # [2, 1, 6]
  linear = linear(cp_replicate_4, cp_replicate, cp_replicate_1)  # [2, 1, 8] R
  cp_unsplit = cp_unsplit(linear)  # [2, 1, 8] R
  silu = silu(cp_unsplit)  # [2, 1, 8] R
  scale = linear(silu, cp_replicate_2, cp_replicate_3)  # [2, 1, 8] R
  cp_unsplit_1 = cp_unsplit(scale)  # [2, 1, 8] R
  view = .view(cp_unsplit_1, 2, -1, 8)  # [2, 1, 8] R
  cp_pin = cp_pin(view)  # [2, 1, 8] R
  mul_1 = mul(cp_shard, cp_pin)  # [2, 60, 8] S(1)""",
    )


@pytest.mark.parametrize("tokens", [60, 64])
def test_a_flattened_table_is_cut_as_a_view_would_be(mesh, tokens):
    """A placement that is asked for would be another one, and gathered later."""
    text = captured(mesh, True, tokens).text.replace(f"{2 * tokens}", "2S")
    assert_golden(
        lines_with(text.replace(f"{tokens}", "S"), "table", "linear(", "shard_1"),
        """\
table = .to(cat, torch.float32)  # [2S, 6]
unflatten_1 = unflatten(table, 0, (2, -1))  # [2, S, 6]
cp_shard_1 = cp_shard(unflatten_1, 1)  # [2, S, 6] S(1)
flatten_2 = flatten(cp_shard_1, 0, 1)  # [2S, 6] _S(0, 2)
linear = linear(flatten_2, cp_replicate, cp_replicate_1)  # [2S, 8] _S(0, 2)
scale = linear(silu, cp_replicate_2, cp_replicate_3)  # [2S, 8] _S(0, 2)""",
    )


def test_patches_that_frozen_weights_make(mesh):
    """LoRA: the weights that are not trained are plain, too."""

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches, self.base = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, 8)
            self.requires_grad_(False)
            self.down, self.up = nn.Linear(8, 2), nn.Linear(2, 8)

        def forward(self, image):
            x = self.patches(image).flatten(2).transpose(1, 2)
            return attend(self.base(x) + self.up(self.down(x)))

    text = capture(Adapted(), torch.randn(2, 3, 16, 16), mesh=mesh).text
    assert_golden(
        lines_with(text, "linear(", "cp_shard(", "add"),
        """\
cp_shard = cp_shard(x, 1)  # [2, 64, 8] S(1)
linear = linear(cp_shard, cp_replicate_4, cp_replicate_5)  # [2, 64, 8] S(1)
cp_shard_1 = cp_shard(x, 1)  # [2, 64, 8] S(1)
linear_1 = linear(cp_shard_1, cp_replicate, cp_replicate_1)  # [2, 64, 2] S(1)
linear_2 = linear(linear_1, cp_replicate_2, cp_replicate_3)  # [2, 64, 8] S(1)
add = add(linear, linear_2)  # [2, 64, 8] S(1)
unflatten = .unflatten(add, -1, (4, -1))  # [2, 64, 4, 2] S(1)""",
    )
