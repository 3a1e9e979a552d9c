"""Of what keys and values are made, and when a rank makes all of them."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from cpcompile.cost.hardware.profile import load_profile
from cpcompile.cost.plans import Strategy
from cpcompile.errors import RewriteError
from tests.golden import capture as capturing
from tests.golden.capture import capture, changes
from tests.golden.golden_text import assert_golden, lines_with
from tests.golden.operands import heads
from tests.support.latent_attention import HEADS, LATENT, MADE, ROPE, WIDTH
from tests.support.latent_attention import LatentAttention as Latent

TOKENS = 40


def sources(module, mesh, x=None, **options):
    """What is gathered for each call, by shape, with its share of the bytes."""
    x = torch.zeros(2, TOKENS, WIDTH) if x is None else x
    options = {"strategy": "latents", "shard": {"x": 1}, **options}
    found = capture(module, x, mesh=mesh, until="find_latents", **options)
    return [
        ([tuple(x.meta["example_value"].shape) for x in s.gathered], s.share)
        for s in found.ctx.findings.key_sources.values()
    ]


@pytest.mark.parametrize("join", ["cat", "writes"])
def test_one_value_has_both(join, mesh):
    """The latent and the part with positions leave one product together."""
    ((gathered, share),) = sources(Latent(join), mesh)
    assert gathered == [(2, TOKENS, LATENT + ROPE)]
    assert share == (LATENT + ROPE) / MADE


def test_what_every_rank_computes(mesh):
    step = capture(
        Latent(),
        torch.zeros(2, TOKENS, WIDTH),
        mesh=mesh,
        shard={"x": 1},
        strategy="latents",
        until="insert_attention",
    )["insert_attention"]
    text = changes(step)
    assert text.count("'key source'") == 6  # the value, weights, cosines and sines
    assert_golden(
        lines_with(text, " = constraint(", " = cp.", "transpose_2:"),
        """\
+ constraint_3 = constraint(l_self_modules_up_parameters_bias_, 'key source', None)
+ constraint_2 = constraint(l_self_modules_up_parameters_weight_, 'key source', None)
+ constraint_1 = constraint(l_self_modules_latent_norm_parameters_weight_, 'key source',
    None)
+ constraint = constraint(linear_1, 'key source', 1)
+ constraint_4 = constraint(cos_2, 'key source', None)
+ constraint_5 = constraint(sin_2, 'key source', None)
+ constraint_6 = constraint(k_1, 'computed keys')
+ constraint_7 = constraint(split_4[1], 'computed keys')
+ all_gather_attention_default = cp.all_gather_attention(q_1, constraint_6,
    constraint_7, sizes=[40, 40], spec='causal scale=0.288675 whole_keys', group=GROUP)
~ transpose_2: y -> all_gather_attention_default[0]""",
    )


def made(k_of, v_of=None):
    """Attention with keys and values of these."""

    def forward(x):
        k = heads(k_of(x), 2)
        v = k if v_of is None else heads(v_of(x), 2)
        q = heads(up(x, 16), 2)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    return forward


def up(x, width, by=0.1):
    return F.linear(x, torch.full((width, x.shape[-1]), by))


NARROW = {
    "one value is both": (lambda x: up(x, 16), None),
    "two of one": (lambda x: up(x, 16), lambda x: up(x, 16, 0.2)),
    "a sum with what is narrow": (
        lambda x: x[..., :4].repeat(1, 1, 4) + up(x[..., 4:], 16),
        lambda x: up(x[..., :2], 16),
    ),
}
WIDE = {
    "half as wide": (lambda x: up(x.cumsum(1), 16), lambda x: up(x.flip(1), 16)),
    "a random number": (
        lambda x: F.dropout(up(x[..., :2], 16)),
        lambda x: F.dropout(up(x[..., :2], 16)),
    ),
    "tokens that meet": (
        lambda x: up(x[..., :2], 16).cumsum(1),
        lambda x: up(x[..., :2], 16).flip(1),
    ),
}


@pytest.mark.parametrize("name", NARROW)
def test_it_is_narrow(name, mesh):
    ((_, share),) = sources(made(*NARROW[name]), mesh, torch.zeros(2, TOKENS, 8))
    assert share <= 0.5


@pytest.mark.parametrize("name", WIDE)
def test_a_twin_stays(name, mesh):
    assert sources(made(*WIDE[name]), mesh, torch.zeros(2, TOKENS, 8)) == []


def test_a_value_that_is_written_to_is_not_made_twice(mesh):
    class Written(Latent):
        def keys(self, h):
            k, v = super().keys(h)
            return k.mul_(0.5), (v * 1.0).add_(1.0)

    assert sources(Written(), mesh) == []


def test_a_strategy_that_is_not_possible_says_why(mesh):
    x = torch.zeros(2, TOKENS, 8)
    found = capture(made(*WIDE["tokens that meet"]), x, mesh=mesh, strategy="latents")
    assert isinstance(found.error, RewriteError)
    assert "k and v are not made, token by token, of values with" in str(found.error)


def planned(mesh, **rates):
    """The strategy of a call whose profile has these rates."""
    profile = replace(load_profile("h100_sxm"), **rates)
    with mock.patch.object(capturing, "load_profile", lambda _: profile):
        found = capture(
            Latent(),
            torch.zeros(2, 4096, WIDTH),
            mesh=mesh,
            shard={"x": 1},
            strategy="auto",
            layout="auto",
            until="choose_strategy",
        )
    (plan,) = found.ctx.findings.plans.values()
    return plan.strategy


def test_links_and_arithmetic_decide(mesh):
    """Slow links favour few bytes, and slow arithmetic little work."""
    slow = {"link_bytes_per_second": 1e8, "collective_bytes_per_second": 1e8}
    slow |= {"all_to_all_bytes_per_second": 1e8, "reduce_scatter_bytes_per_second": 1e8}
    assert planned(mesh, **slow) is Strategy.LATENTS
    assert planned(mesh, forward_flops_per_second=1e9) is not Strategy.LATENTS


def test_it_is_not_looked_for_where_it_was_not_asked_for(mesh):
    assert sources(Latent(), mesh, strategy="ring") == []


def test_heads_are_not_taken_for_tokens(mesh):
    """As many tokens as heads."""
    ((gathered, _),) = sources(Latent(), mesh, torch.zeros(2, HEADS, WIDTH))
    assert gathered == [(2, HEADS, LATENT + ROPE)]


def test_memory_that_is_written_is_read_in_its_place(mesh):
    """Both k and v are what a call writes into, before they are attended to."""

    def forward(x):
        kept = up(x, 16).clone()
        base = kept[..., :4]
        kept[:, :3] = x[:, :3].repeat(1, 1, 2)
        k = heads(kept, 2)
        q = heads(up(x, 16), 2)
        y = F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)
        return y + base.sum()

    assert sources(forward, mesh, torch.zeros(2, TOKENS, 8)) == []
