"""Attention calls become cp:: operators of their plan; all else stays as it is."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import cpcompile as cp
from cpcompile import config
from tests.golden.capture import capture, capture_pass
from tests.golden.golden_text import assert_golden
from tests.golden.operands import QKV


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def make_qkv(*shape, kv_heads=None):
    kv_shape = list(shape)
    if kv_heads is not None:
        kv_shape[1] = kv_heads
    return torch.randn(shape), torch.randn(kv_shape), torch.randn(kv_shape)


def test_ring_on_plain_inputs(mesh):
    captured = capture(
        attend, *make_qkv(2, 4, 16, 8), mesh=mesh, shard=QKV, until="insert_attention"
    )
    step = captured["insert_attention"]
    assert step.rewrites == 1
    assert_golden(
        step.before,
        """\
l_q_ = input  # [2, 4, 16, 8]
l_k_ = input  # [2, 4, 16, 8]
l_v_ = input  # [2, 4, 16, 8]
scaled_dot_product_attention = scaled_dot_product_attention(l_q_, l_k_, l_v_,
    is_causal=True)  # [2, 4, 16, 8]
return (scaled_dot_product_attention,)""",
    )
    assert_golden(
        step.after,
        """\
l_q_ = input  # [2, 4, 16, 8]
l_k_ = input  # [2, 4, 16, 8]
l_v_ = input  # [2, 4, 16, 8]
ring_attention_default = cp.ring_attention(l_q_, l_k_, l_v_, sizes=[16, 16],
    spec='causal scale=0.353553', group=GROUP)
getitem = ring_attention_default[0]  # [2, 4, 16, 8]
return (getitem,)""",
    )


def test_all_gather_on_plain_inputs(mesh):
    captured = capture(
        attend,
        *make_qkv(2, 4, 16, 8),
        strategy="all_gather",
        mesh=mesh,
        shard=QKV,
        until="insert_attention",
    )
    step = captured["insert_attention"]
    assert step.rewrites == 1
    assert_golden(
        step.after,
        """\
l_q_ = input  # [2, 4, 16, 8]
l_k_ = input  # [2, 4, 16, 8]
l_v_ = input  # [2, 4, 16, 8]
all_gather_attention_default = cp.all_gather_attention(l_q_, l_k_, l_v_, sizes=[16, 16],
    spec='causal scale=0.353553', group=GROUP)
getitem = all_gather_attention_default[0]  # [2, 4, 16, 8]
return (getitem,)""",
    )


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_sharded_inputs(mesh, strategy):
    """The graph is the one of plain inputs; only the placements differ."""
    sharded = [cp.shard(x, mesh, 2) for x in make_qkv(2, 4, 16, 8)]
    step = capture_pass("insert_attention", attend, *sharded, strategy=strategy)
    assert step.rewrites == 1
    assert_golden(
        step.before,
        """\
l_q_ = input  # [2, 4, 16, 8] S(2)
l_k_ = input  # [2, 4, 16, 8] S(2)
l_v_ = input  # [2, 4, 16, 8] S(2)
scaled_dot_product_attention = scaled_dot_product_attention(l_q_, l_k_, l_v_,
    is_causal=True)  # [2, 4, 16, 8] S(2)
return (scaled_dot_product_attention,)""",
    )
    assert_golden(
        step.after.replace(strategy, "STRATEGY"),
        """\
l_q_ = input  # [2, 4, 16, 8] S(2)
l_k_ = input  # [2, 4, 16, 8] S(2)
l_v_ = input  # [2, 4, 16, 8] S(2)
STRATEGY_attention_default = cp.STRATEGY_attention(l_q_, l_k_, l_v_, sizes=[16, 16],
    spec='causal scale=0.353553', group=GROUP)
getitem = STRATEGY_attention_default[0]  # [2, 4, 16, 8] S(2)
return (getitem,)""",
    )


def test_three_dimensions(mesh):
    step = capture_pass(
        "insert_attention",
        attend,
        *make_qkv(4, 16, 8),
        mesh=mesh,
        shard={"q": 1, "k": 1},
    )
    assert step.rewrites == 1
    assert_golden(
        step.after,
        """\
l_q_ = input  # [4, 16, 8]
l_k_ = input  # [4, 16, 8]
l_v_ = input  # [4, 16, 8]
unsqueeze = unsqueeze(l_q_, 1)  # [4, 1, 16, 8]
unsqueeze_1 = unsqueeze(l_k_, 1)  # [4, 1, 16, 8]
unsqueeze_2 = unsqueeze(l_v_, 1)  # [4, 1, 16, 8]
ring_attention_default = cp.ring_attention(unsqueeze, unsqueeze_1, unsqueeze_2,
    sizes=[16, 16], spec='causal scale=0.353553', group=GROUP)
getitem = ring_attention_default[0]  # [4, 1, 16, 8]
squeeze = squeeze(getitem, 1)  # [4, 16, 8]
return (squeeze,)""",
    )


def test_one_key_head_is_broadcast(mesh):
    """Without enable_gqa: torch broadcasts one head, and so does the operator."""
    step = capture_pass(
        "insert_attention",
        attend,
        *make_qkv(2, 4, 16, 8, kv_heads=1),
        mesh=mesh,
        shard={"q": 2},
    )
    assert step.rewrites == 1
    assert_golden(
        step.after,
        """\
l_q_ = input  # [2, 4, 16, 8]
l_k_ = input  # [2, 1, 16, 8]
l_v_ = input  # [2, 1, 16, 8]
ring_attention_default = cp.ring_attention(l_q_, l_k_, l_v_, sizes=[16, 16],
    spec='causal scale=0.353553', group=GROUP)
getitem = ring_attention_default[0]  # [2, 4, 16, 8]
return (getitem,)""",
    )


def test_grouped_heads(mesh):
    def grouped(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    inputs = make_qkv(2, 4, 16, 8, kv_heads=2)
    step = capture_pass("insert_attention", grouped, *inputs, mesh=mesh, shard=QKV)
    assert step.rewrites == 1
    assert_golden(
        step.after,
        """\
l_q_ = input  # [2, 4, 16, 8]
l_k_ = input  # [2, 2, 16, 8]
l_v_ = input  # [2, 2, 16, 8]
ring_attention_default = cp.ring_attention(l_q_, l_k_, l_v_, sizes=[16, 16],
    spec='scale=0.353553', group=GROUP)
getitem = ring_attention_default[0]  # [2, 4, 16, 8]
return (getitem,)""",
    )


def test_keywords_and_scale(mesh):
    def keywords(q, k, v):
        return F.scaled_dot_product_attention(
            value=v, key=k, query=q, is_causal=True, scale=0.5
        )

    step = capture_pass(
        "insert_attention", keywords, *make_qkv(2, 4, 16, 8), mesh=mesh, shard=QKV
    )
    assert step.rewrites == 1
    assert_golden(
        step.after,
        """\
l_v_ = input  # [2, 4, 16, 8]
l_k_ = input  # [2, 4, 16, 8]
l_q_ = input  # [2, 4, 16, 8]
ring_attention_default = cp.ring_attention(l_q_, l_k_, l_v_, sizes=[16, 16],
    spec='causal scale=0.5', group=GROUP)
getitem = ring_attention_default[0]  # [2, 4, 16, 8]
return (getitem,)""",
    )


def test_cross_attention_of_two_lengths(mesh):
    q, k, v = (
        torch.randn(2, 4, 16, 8),
        torch.randn(2, 4, 24, 8),
        torch.randn(2, 4, 24, 6),
    )
    step = capture_pass("insert_attention", attend, q, k, v, mesh=mesh, shard=QKV)
    assert step.rewrites == 1
    assert_golden(
        step.after,
        """\
l_q_ = input  # [2, 4, 16, 8]
l_k_ = input  # [2, 4, 24, 8]
l_v_ = input  # [2, 4, 24, 6]
ring_attention_default = cp.ring_attention(l_q_, l_k_, l_v_, sizes=[16, 24],
    spec='causal scale=0.353553', group=GROUP)
getitem = ring_attention_default[0]  # [2, 4, 16, 6]
return (getitem,)""",
    )


def test_checkpoint_region(mesh):
    def recomputed(q, k, v):
        return checkpoint(attend, q, k, v, use_reentrant=False)

    inputs = [x.requires_grad_() for x in make_qkv(2, 4, 16, 8)]
    step = capture_pass("insert_attention", recomputed, *inputs, mesh=mesh, shard=QKV)
    assert step.rewrites == 1
    assert_golden(
        step.before,
        """\
l_q_ = input  # [2, 4, 16, 8]
l_k_ = input  # [2, 4, 16, 8]
l_v_ = input  # [2, 4, 16, 8]
wrap_body_0 = get_attr wrap_body_0
tag_activation_checkpoint = tag_activation_checkpoint(wrap_body_0, l_q_, l_k_, l_v_,
    use_reentrant=False)
    l_q_ = input  # [2, 4, 16, 8]
    l_k_ = input  # [2, 4, 16, 8]
    l_v_ = input  # [2, 4, 16, 8]
    scaled_dot_product_attention = scaled_dot_product_attention(l_q_, l_k_, l_v_,
        is_causal=True)  # [2, 4, 16, 8]
    return (scaled_dot_product_attention,)
getitem = tag_activation_checkpoint[0]  # [2, 4, 16, 8]
return (getitem,)""",
    )
    assert_golden(
        step.after,
        """\
l_q_ = input  # [2, 4, 16, 8]
l_k_ = input  # [2, 4, 16, 8]
l_v_ = input  # [2, 4, 16, 8]
wrap_body_0 = get_attr wrap_body_0
tag_activation_checkpoint = tag_activation_checkpoint(wrap_body_0, l_q_, l_k_, l_v_,
    use_reentrant=False)
    l_q_ = input  # [2, 4, 16, 8]
    l_k_ = input  # [2, 4, 16, 8]
    l_v_ = input  # [2, 4, 16, 8]
    ring_attention_default = cp.ring_attention(l_q_, l_k_, l_v_, sizes=[16, 16],
        spec='causal scale=0.353553', group=GROUP)
    getitem = ring_attention_default[0]  # [2, 4, 16, 8]
    return (getitem,)
getitem = tag_activation_checkpoint[0]  # [2, 4, 16, 8]
return (getitem,)""",
    )


def test_attention_to_the_result_of_attention(mesh):
    """The operand of the second call is a node that the first rewrite replaces."""

    def twice(q, k, v):
        return attend(attend(q, k, v), k, v)

    captured = capture(
        twice, *make_qkv(2, 4, 16, 8), mesh=mesh, shard=QKV, until="insert_attention"
    )
    step = captured["insert_attention"]
    assert step.rewrites == 2
    assert "cp.ring_attention(getitem, l_k_, l_v_, sizes=[16, 16]" in step.after


def test_heads_in_groups(mesh):
    """Under a budget that an exchange of all heads does not meet; the twin does."""
    budget = 2 * 2**20
    inputs = make_qkv(1, 64, 128, 64)
    with config.patch(memory_budget=budget):
        captured = capture(
            attend,
            *inputs,
            strategy="ulysses",
            mesh=mesh,
            shard=QKV,
            until="insert_attention",
        )
        smaller = capture(
            attend,
            *make_qkv(1, 64, 64, 64),
            strategy="ulysses",
            mesh=mesh,
            shard=QKV,
            until="insert_attention",
        )
    assert_golden(
        captured["insert_attention"].after,
        """\
l_q_ = input  # [1, 64, 128, 64]
l_k_ = input  # [1, 64, 128, 64]
l_v_ = input  # [1, 64, 128, 64]
ulysses_attention_default = cp.ulysses_attention(l_q_, l_k_, l_v_, sizes=[128, 128],
    spec='causal scale=0.125 head_groups=2', group=GROUP)
getitem = ulysses_attention_default[0]  # [1, 64, 128, 64]
return (getitem,)""",
    )
    assert "head_groups" not in smaller["insert_attention"].after
