"""Every call that can be rewritten gets a plan, which lists what was considered."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

import cpcompile as cp
from cpcompile.passes.choose_strategy import workload
from tests.golden.capture import capture

sdpa = F.scaled_dot_product_attention
QKV = {"q": 2, "k": 2, "v": 2}


def attend(q, k, v):
    return sdpa(q, k, v, is_causal=True)


def make_qkv(heads=32, kv_heads=8, tokens=8192):
    """Large, so on the meta device's terms: nothing is computed."""
    shapes = [(1, h, tokens, 128) for h in (heads, kv_heads, kv_heads)]
    return [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]


def grouped(q, k, v):
    return sdpa(q, k, v, is_causal=True, enable_gqa=True)


def plans(captured):
    """One line per plan, one per candidate, best first."""
    step = captured["choose_strategy"]
    assert not step.changed
    assert step.rewrites == len(captured.ctx.plans)
    lines = []
    for call, plan in captured.ctx.plans.items():
        how = "forced" if plan.forced else "chosen"
        lines.append(f"{call.path}: {plan.strategy.value} {how}, {plan.hardware}")
        lines += [
            f"  {c.strategy.value}: {c.seconds * 1e3:.3f} ms, "
            f"{c.exposed_seconds * 1e3:.3f} ms exposed, "
            f"{c.peak_extra_bytes / 2**20:.1f} MiB, {c.kernels} kernels"
            for c in plan.candidates
        ]
    return "\n".join(lines)


def test_the_cheapest_is_chosen(mesh):
    captured = capture(grouped, *make_qkv(), strategy="auto", mesh=mesh, shard=QKV)
    assert_expected_inline(
        plans(captured),
        """\
<top level>: all_gather chosen, h100_sxm
  all_gather: 0.552 ms, 0.099 ms exposed, 64.0 MiB, 2 kernels
  ring: 0.767 ms, 0.000 ms exposed, 40.0 MiB, 8 kernels""",
    )


def test_a_forced_strategy_lists_the_others_all_the_same(mesh):
    captured = capture(grouped, *make_qkv(), strategy="ring", mesh=mesh, shard=QKV)
    assert_expected_inline(
        plans(captured),
        """\
<top level>: ring forced, h100_sxm
  all_gather: 0.552 ms, 0.099 ms exposed, 64.0 MiB, 2 kernels
  ring: 0.767 ms, 0.000 ms exposed, 40.0 MiB, 8 kernels""",
    )


def test_sharded_inputs_have_the_same_plan(mesh):
    plain = capture(grouped, *make_qkv(), strategy="auto", mesh=mesh, shard=QKV)
    sharded = [cp.shard(x, mesh, 2) for x in make_qkv()]
    assert plans(capture(grouped, *sharded, strategy="auto")) == plans(plain)


def test_the_backward_is_planned_for(mesh):
    inputs = [x.requires_grad_() for x in make_qkv()]
    captured = capture(grouped, *inputs, strategy="auto", mesh=mesh, shard=QKV)
    assert_expected_inline(
        plans(captured),
        """\
<top level>: ring chosen, h100_sxm
  ring: 2.256 ms, 0.038 ms exposed, 52.0 MiB, 8 kernels
  all_gather: 2.249 ms, 0.381 ms exposed, 272.0 MiB, 2 kernels""",
    )
    with torch.no_grad():
        captured = capture(grouped, *inputs, strategy="auto", mesh=mesh, shard=QKV)
    (call,) = captured.ctx.calls
    assert not workload(call, captured.ctx).backward


def test_the_workload_is_that_of_all_ranks(mesh):
    captured = capture(grouped, *make_qkv(), mesh=mesh, shard=QKV)
    (call,) = captured.ctx.calls
    assert dataclasses.asdict(workload(call, captured.ctx)) == {
        "batch": 1,
        "heads": 32,
        "kv_heads": 8,
        "q_len": 8192,
        "kv_len": 8192,
        "head_dim": 128,
        "value_dim": 128,
        "bytes_per_element": 2,
        "causal": True,
        "backward": False,
        "ranks": 8,
    }


def test_the_ranks_are_those_of_the_axis(mesh_2d):
    captured = capture(grouped, *make_qkv(), mesh=mesh_2d, shard=QKV)
    (call,) = captured.ctx.calls
    assert workload(call, captured.ctx).ranks == 4


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "auto"])
def test_calls_with_an_obstacle_get_no_plan(mesh, strategy):
    def dropped(q, k, v):
        return sdpa(q, k, v, dropout_p=0.1)

    inputs = make_qkv(4, 4, 16)
    captured = capture(dropped, *inputs, strategy=strategy, mesh=mesh, shard=QKV)
    assert captured["choose_strategy"].rewrites == 0
    assert plans(captured) == ""


def test_each_call_has_its_own_plan(mesh):
    def two(q, k, v):
        return attend(q, k, v) + sdpa(q, k, v)

    captured = capture(two, *make_qkv(4, 4, 16), mesh=mesh, shard=QKV)
    assert captured["choose_strategy"].rewrites == 2
