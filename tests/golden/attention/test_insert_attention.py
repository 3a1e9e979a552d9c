"""Attention calls become cp:: operators of their plan; all else stays as it is."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import cpcompile as cp
from cpcompile import config
from cpcompile.ranks.mesh_factors import hybrid_groups
from tests.golden.capture import capture, capture_pass, changes
from tests.golden.golden_text import assert_golden, table
from tests.golden.operands import QKV


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def make_qkv(*shape, kv_heads=None):
    kv_shape = list(shape)
    if kv_heads is not None:
        kv_shape[1] = kv_heads
    return torch.randn(shape), torch.randn(kv_shape), torch.randn(kv_shape)


def inserted(fn, *inputs, count=1, **options):
    """The step of the pass."""
    step = capture_pass("insert_attention", fn, *inputs, **{"shard": QKV} | options)
    assert step.rewrites == count
    return step


def test_plain_and_sharded_inputs(mesh):
    """The graph is the same one; only the placements differ."""
    plain = inserted(attend, *make_qkv(2, 4, 16, 8), mesh=mesh)
    assert_golden(
        f"{plain.before}\n  ->\n{plain.after}",
        """\
l_q_ = input  # [2, 4, 16, 8]
l_k_ = input  # [2, 4, 16, 8]
l_v_ = input  # [2, 4, 16, 8]
scaled_dot_product_attention = scaled_dot_product_attention(l_q_, l_k_, l_v_,
    is_causal=True)  # [2, 4, 16, 8]
return (scaled_dot_product_attention,)
  ->
l_q_ = input  # [2, 4, 16, 8]
l_k_ = input  # [2, 4, 16, 8]
l_v_ = input  # [2, 4, 16, 8]
ring_attention_default = cp.ring_attention(l_q_, l_k_, l_v_, sizes=[16, 16],
    spec='causal scale=0.353553', group=GROUP)
getitem = ring_attention_default[0]  # [2, 4, 16, 8]
return (getitem,)""",
    )
    inputs = [cp.shard(x, mesh, 2) for x in make_qkv(2, 4, 16, 8)]
    for strategy in ("ring", "all_gather"):
        step = inserted(attend, *inputs, strategy=strategy, shard={})
        assert step.before.count(" S(2)") == 4
        assert step.after.count(" S(2)") == 4
        text = step.after.replace(strategy, "ring")
        assert text.replace(" S(2)", "") == plain.after


def test_strategies(mesh):
    inputs = make_qkv(2, 4, 16, 8)
    steps = [
        inserted(attend, *inputs, strategy=name, mesh=mesh)
        for name in ("all_gather", "ulysses")
    ]
    assert_golden(
        "\n".join(map(changes, steps)),
        """\
+ all_gather_attention_default = cp.all_gather_attention(l_q_, l_k_, l_v_,
    sizes=[16, 16], spec='causal scale=0.353553', group=GROUP)
~ return: scaled_dot_product_attention -> all_gather_attention_default[0]
- scaled_dot_product_attention
+ ulysses_attention_default = cp.ulysses_attention(l_q_, l_k_, l_v_, sizes=[16, 16],
    spec='causal scale=0.353553', group=GROUP)
~ return: scaled_dot_product_attention -> ulysses_attention_default[0]
- scaled_dot_product_attention""",
    )


@pytest.mark.parametrize("inner", ["ulysses", "ring"])
def test_hybrid(mesh, inner):
    """The mesh axis called "ulysses" exchanges heads; the other one is the ring."""
    names = ("ring", "ulysses") if inner == "ulysses" else ("ulysses", "ring")
    given = {"mesh": init_device_mesh("cpu", (4, 2), mesh_dim_names=names)}
    given |= {"axis": names, "strategy": "hybrid", "shard": QKV}
    captured = capture(attend, *make_qkv(2, 4, 16, 8), **given)
    step = captured["insert_attention"]
    assert step.rewrites == 1
    (plan,) = captured.ctx.findings.plans.values()
    groups = hybrid_groups(captured.ctx.mesh, 0, plan.chosen.degrees)
    assert groups.ring == given["mesh"].get_group("ring").group_name
    assert groups.ulysses == given["mesh"].get_group("ulysses").group_name
    text = changes(step).replace(str(inner == "ulysses") + ")", "INNER)")
    assert_golden(
        text,
        """\
+ hybrid_attention_default = cp.hybrid_attention(l_q_, l_k_, l_v_, sizes=[16, 16],
    spec='causal scale=0.353553', group=GROUP, ulysses_group=ULYSSES, ring_group=RING,
    ulysses_inner=INNER)
~ return: scaled_dot_product_attention -> hybrid_attention_default[0]
- scaled_dot_product_attention""",
    )


def grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def keywords(q, k, v):
    return F.scaled_dot_product_attention(
        value=v, key=k, query=q, is_causal=True, scale=0.5
    )


CALLS = {
    "three dimensions": (attend, make_qkv(4, 16, 8), {"q": 1, "k": 1}),
    # Without enable_gqa: torch broadcasts one head, and so does the operator.
    "one key head": (attend, make_qkv(2, 4, 16, 8, kv_heads=1), {"q": 2}),
    "grouped heads": (grouped, make_qkv(2, 4, 16, 8, kv_heads=2), QKV),
    "keywords and scale": (keywords, make_qkv(2, 4, 16, 8), QKV),
    "two lengths": (
        attend,
        (torch.randn(2, 4, 16, 8), torch.randn(2, 4, 24, 8), torch.randn(2, 4, 24, 6)),
        QKV,
    ),
}


def test_calls(mesh):
    texts = {}
    for name, (fn, inputs, shard) in CALLS.items():
        text = changes(inserted(fn, *inputs, mesh=mesh, shard=shard))
        texts[name] = text.split("\n~")[0].removeprefix("+ ring_attention_default = ")
    assert_golden(
        table(texts),
        """\
three dimensions:
  + unsqueeze = unsqueeze(l_q_, 1)
  + unsqueeze_1 = unsqueeze(l_k_, 1)
  + unsqueeze_2 = unsqueeze(l_v_, 1)
  + ring_attention_default = cp.ring_attention(unsqueeze, unsqueeze_1, unsqueeze_2,
      sizes=[16, 16], spec='causal scale=0.353553', group=GROUP)
  + squeeze = squeeze(ring_attention_default[0], 1)
one key head: cp.ring_attention(l_q_, l_k_, l_v_, sizes=[16, 16],
    spec='causal scale=0.353553', group=GROUP)
grouped heads: cp.ring_attention(l_q_, l_k_, l_v_, sizes=[16, 16],
    spec='scale=0.353553', group=GROUP)
keywords and scale: cp.ring_attention(l_q_, l_k_, l_v_, sizes=[16, 16],
    spec='causal scale=0.5', group=GROUP)
two lengths: cp.ring_attention(l_q_, l_k_, l_v_, sizes=[16, 24],
    spec='causal scale=0.353553', group=GROUP)""",
    )


def test_checkpoint_region(mesh):
    def recomputed(q, k, v):
        return checkpoint(attend, q, k, v, use_reentrant=False)

    inputs = [x.requires_grad_() for x in make_qkv(2, 4, 16, 8)]
    assert_golden(
        inserted(recomputed, *inputs, mesh=mesh).after,
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

    step = inserted(twice, *make_qkv(2, 4, 16, 8), count=2, mesh=mesh)
    assert "cp.ring_attention(getitem, l_k_, l_v_, sizes=[16, 16]" in step.after


def test_heads_in_groups(mesh):
    """Under a budget that an exchange of all heads does not meet; the twin does."""
    options = {"strategy": "ulysses", "mesh": mesh}
    with config.patch(memory_budget=2 * 2**20):
        larger = inserted(attend, *make_qkv(1, 64, 128, 64), **options)
        smaller = inserted(attend, *make_qkv(1, 64, 64, 64), **options)
    assert "spec='causal scale=0.125 head_groups=2'" in larger.after
    assert "head_groups" not in smaller.after
