"""Values whose gradients must not come back split, and those whose may."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.golden.capture import body, sharded
from tests.golden.golden_text import assert_golden

sdpa = F.scaled_dot_product_attention


def test_a_view_that_cannot_be_undone_on_parts(mesh):
    scale = nn.Parameter(torch.randn(8))

    def windows(x):
        x = x * scale
        means = x.unflatten(1, (-1, 4)).mean(2, keepdim=True)
        return sdpa(x, x, x) + means.expand(-1, -1, 4, -1).flatten(1, 2)

    assert_golden(
        body(sharded(windows, mesh, 2, 24, 8)),
        """\
cp_shard = cp_shard(l_x_, 1)
cp_replicate = cp_replicate(l_scale_)
x = mul(cp_shard, cp_replicate)
cp_replicated = cp_replicated(unflatten, x, 1, (-1, 4))
means = .mean(cp_replicated, 2, keepdim=True)
cp_unsplit = cp_unsplit(means)
unsqueeze = unsqueeze(x, 1)
unsqueeze_1 = unsqueeze(x, 1)
unsqueeze_2 = unsqueeze(x, 1)
ring_attention_default = cp.ring_attention(unsqueeze, unsqueeze_1, unsqueeze_2,
    sizes=[24, 24], spec='scale=0.353553', group=GROUP)
getitem = ring_attention_default[0]
squeeze = squeeze(getitem, 1)
expand = .expand(cp_unsplit, -1, -1, 4, -1)
flatten = .flatten(expand, 1, 2)
cp_unsplit_1 = cp_unsplit(flatten)
add = add(squeeze, cp_unsplit_1)
cp_gather = cp_gather(add)
return (cp_gather,)""",
    )


def test_one_row_for_all_ranks(mesh):
    row = nn.Parameter(torch.randn(1, 8))

    def latents(x):
        return sdpa(row.expand(2, -1, -1), x, x)

    assert_golden(
        body(sharded(latents, mesh)),
        """\
cp_replicate = cp_replicate(l_row_)
cp_shard = cp_shard(l_x_, 1)
expand = .expand(cp_replicate, 2, -1, -1)
cp_unsplit = cp_unsplit(expand)
unsqueeze = unsqueeze(cp_unsplit, 1)
cp_unsplit_1 = cp_unsplit(unsqueeze)
unsqueeze_1 = unsqueeze(cp_shard, 1)
unsqueeze_2 = unsqueeze(cp_shard, 1)
ring_attention_default = cp.ring_attention(cp_unsplit_1, unsqueeze_1, unsqueeze_2,
    sizes=[1, 16], spec='scale=0.353553', group=GROUP)
getitem = ring_attention_default[0]
squeeze = squeeze(getitem, 1)
cp_gather = cp_gather(squeeze)
return (cp_gather,)""",
    )


def test_what_takes_split_gradients_stays(mesh):
    weight = nn.Parameter(torch.randn(16, 8))

    def positions(x):
        return sdpa(x, x, x) + weight.tanh() * 2

    assert_golden(
        body(sharded(positions, mesh)),
        """\
cp_shard = cp_shard(l_x_, 1)
cp_replicate = cp_replicate(l_weight_)
unsqueeze = unsqueeze(cp_shard, 1)
unsqueeze_1 = unsqueeze(cp_shard, 1)
unsqueeze_2 = unsqueeze(cp_shard, 1)
ring_attention_default = cp.ring_attention(unsqueeze, unsqueeze_1, unsqueeze_2,
    sizes=[16, 16], spec='scale=0.353553', group=GROUP)
getitem = ring_attention_default[0]
squeeze = squeeze(getitem, 1)
tanh = .tanh(cp_replicate)
mul = mul(tanh, 2)
add = add(squeeze, mul)
cp_gather = cp_gather(add)
return (cp_gather,)""",
    )


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
