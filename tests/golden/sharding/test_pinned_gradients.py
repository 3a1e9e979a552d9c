"""Values whose gradients must not come back split, and those whose may."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.golden.capture import body, inside, sharded
from tests.golden.golden_text import assert_golden, lines_without, table

sdpa = F.scaled_dot_product_attention


SCALE, ROW = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(1, 8))
WEIGHT = nn.Parameter(torch.randn(24, 8))


def windows(x):
    """A view that cannot be undone on parts."""
    x = x * SCALE
    means = x.unflatten(1, (-1, 4)).mean(2, keepdim=True)
    return sdpa(x, x, x) + means.expand(-1, -1, 4, -1).flatten(1, 2)


def latents(x):
    """One row for all ranks."""
    return sdpa(ROW.expand(2, -1, -1), x, x)


def test_values_that_take_no_split_gradients(mesh):
    words = ("(cp_shard, 1)", "(x, 1)", "squeeze(ring")
    texts = {
        fn.__name__: lines_without(inside(sharded(fn, mesh, 2, 24, 8)), *words)
        for fn in (windows, latents)
    }
    assert_golden(
        table(texts),
        """\
windows:
  cp_replicate = cp_replicate(g_scale_)
  x = mul(cp_shard, cp_replicate)
  cp_replicated = cp_replicated(unflatten, x, 1, (-1, 4))
  means = .mean(cp_replicated, 2, keepdim=True)
  cp_unsplit = cp_unsplit(means)
  ring_attention_default = cp.ring_attention(unsqueeze, unsqueeze_1, unsqueeze_2,
      sizes=[24, 24], spec='scale=0.353553', group=GROUP)
  expand = .expand(cp_unsplit, -1, -1, 4, -1)
  flatten = .flatten(expand, 1, 2)
  cp_unsplit_1 = cp_unsplit(flatten)
  add = add(squeeze, cp_unsplit_1)
latents:
  cp_replicate = cp_replicate(g_row_)
  expand = .expand(cp_replicate, 2, -1, -1)
  cp_unsplit = cp_unsplit(expand)
  unsqueeze = unsqueeze(cp_unsplit, 1)
  cp_unsplit_1 = cp_unsplit(unsqueeze)
  ring_attention_default = cp.ring_attention(cp_unsplit_1, unsqueeze_1, unsqueeze_2,
      sizes=[1, 24], spec='scale=0.353553', group=GROUP)""",
    )


def test_what_takes_split_gradients_stays(mesh):
    text = body(sharded(lambda x: sdpa(x, x, x) + WEIGHT.tanh() * 2, mesh, 2, 24, 8))
    assert "add = add(squeeze, mul)" in text
    assert "cp_unsplit" not in text and "cp_pin" not in text


def test_a_sum_over_shared_tokens(mesh):
    """Its gradient is the same for all tokens; each rank takes that of its own."""
    scale = nn.Parameter(torch.randn(8))
    weight = nn.Parameter(torch.randn(8, 8))

    def summed(x):
        return F.linear(sdpa(x * scale, x, x), weight).sum()

    lines = body(sharded(summed, mesh)).splitlines()
    assert_golden(
        "\n".join(lines[-5:]),
        """\
linear = linear(squeeze, cp_replicate_1)
cp_pin = cp_pin(linear)
sum_1 = .sum(cp_pin)
cp_gather = cp_gather(sum_1)
return (cp_gather,)""",
    )


def test_a_sum_of_channels_is_not_pinned(mesh):
    scale = nn.Parameter(torch.randn(8))

    def summed(x):
        return sdpa(x * scale, x, x).sum(-1)

    assert "cp_pin" not in body(sharded(summed, mesh))
