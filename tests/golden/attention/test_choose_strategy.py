"""Every call that can be rewritten gets a plan, the one that suits it."""

import dataclasses
import functools
from textwrap import fill
from unittest import mock

import pytest
import torch

import cpcompile as cp
from cpcompile import config
from cpcompile.cost.plans import Direction, Workload
from cpcompile.kernels import choice
from cpcompile.passes.model.attention.choose_strategy import workload
from cpcompile.reporting.graph_report import GraphReport
from tests.golden.capture import capture
from tests.golden.golden_text import assert_golden
from tests.golden.operands import QKV, sdpa

planned = functools.partial(capture, until="choose_strategy")


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
    assert step.rewrites == len(captured.ctx.findings.plans)
    lines = []
    for call, plan in captured.ctx.findings.plans.items():
        how = "forced" if plan.forced else "chosen"
        lines.append(f"{call.path}: {plan.chosen.label} {how}, {plan.hardware}")
        lines += [
            f"  {c.label}: {c.seconds * 1e3:.3f} ms, "
            f"{c.exposed_seconds * 1e3:.3f} ms exposed, "
            f"{c.peak_extra_bytes / 2**20:.1f} MiB, {c.kernels} kernels"
            for c in plan.candidates
        ]
    return "\n".join(lines)


def test_the_cheapest_is_chosen(mesh):
    captured = planned(grouped, *make_qkv(), strategy="auto", mesh=mesh, shard=QKV)
    assert_golden(
        plans(captured),
        """\
<top level>: ulysses chosen, h100_sxm
  ulysses: 0.391 ms, 0.120 ms exposed, 36.0 MiB, 1 kernels
  hybrid 2 (ring) in 4: 0.441 ms, 0.103 ms exposed, 60.0 MiB, 8 kernels
  hybrid 4 in 2 (ring): 0.486 ms, 0.103 ms exposed, 60.0 MiB, 2 kernels
  all_gather: 0.516 ms, 0.118 ms exposed, 64.0 MiB, 1 kernels
  hybrid 4 (ring) in 2: 0.562 ms, 0.091 ms exposed, 60.0 MiB, 8 kernels
  hybrid 2 in 4 (ring): 0.594 ms, 0.091 ms exposed, 60.0 MiB, 4 kernels
  ring: 0.851 ms, 0.040 ms exposed, 40.0 MiB, 8 kernels""",
    )


def test_a_forced_strategy_lists_the_others_all_the_same(mesh):
    chosen, *forced = (
        plans(planned(grouped, *make_qkv(), strategy=name, mesh=mesh, shard=QKV))
        for name in ("auto", "ring", "ulysses", "hybrid")
    )
    labels = ("ring", "ulysses", "hybrid 2 (ring) in 4")
    assert forced == [chosen.replace("ulysses chosen", f"{x} forced") for x in labels]


def test_sharded_inputs_have_the_same_plan(mesh):
    plain = planned(grouped, *make_qkv(), strategy="auto", mesh=mesh, shard=QKV)
    sharded = [cp.shard(x, mesh, 2) for x in make_qkv()]
    assert plans(planned(grouped, *sharded, strategy="auto")) == plans(plain)


@pytest.mark.parametrize("trained", [True, False])
def test_the_backward_is_planned_for(mesh, trained):
    inputs = [x.requires_grad_() for x in make_qkv()]
    with torch.set_grad_enabled(trained):
        captured = planned(grouped, *inputs, strategy="auto", mesh=mesh, shard=QKV)
    (plan,) = captured.ctx.findings.plans.values()
    assert plan.workload.direction is (Direction.BOTH if trained else Direction.FORWARD)


@pytest.mark.parametrize(("fixture", "ranks"), [("mesh", 8), ("mesh_2d", 4)])
def test_the_workload_is_that_of_all_ranks(request, fixture, ranks):
    """Of those of the axis."""
    mesh = request.getfixturevalue(fixture)
    captured = planned(grouped, *make_qkv(), mesh=mesh, shard=QKV)
    (call,) = captured.ctx.findings.calls
    sizes = (1, 32, 8, 8192, 8192, 128, 128, 2)
    wanted = Workload(*sizes, True, Direction.FORWARD, ranks)
    assert workload(call, captured.ctx) == wanted


def test_a_budget_that_nothing_meets_names_the_call_and_the_smallest_need(mesh):
    with config.patch(memory_budget=1 << 20):
        captured = planned(grouped, *make_qkv(), mesh=mesh, shard=QKV, strategy="auto")
    assert_golden(
        fill(str(captured.error), 80),
        """\
attention at <top level>: every strategy is impossible here: ulysses in 4 groups
of heads needs 34.0 MiB of extra memory per rank, and the budget is 1.0 MiB;
that is the smallest need: raise memory_budget, or use more ranks""",
    )


def under_autocast(q, k, v, bias=None):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return sdpa(q, k, v, attn_mask=bias)


def test_autocast_halves_messages_and_memory(mesh):
    """The plan is that of the dtype in which the call computes."""
    q, k, v = (x.float() for x in make_qkv(32, 32, 1024))
    bias = torch.empty(1, 1, 1024, 1024)
    for args in ((q, k, v), (q, k, v, bias)):
        cast = planned(under_autocast, *args, mesh=mesh, shard=QKV)
        half = [x.bfloat16() for x in args]
        plain = planned(sdpa_masked, *half, mesh=mesh, shard=QKV)
        found, wanted = (
            next(iter(x.ctx.findings.plans.values())) for x in (cast, plain)
        )
        assert found.workload == wanted.workload
        assert found.workload.bytes_per_element == 2
        assert found.chosen == wanted.chosen
        report = GraphReport.of(cast.ctx, (), "f")
        assert report.calls[0].dtype == "bfloat16"


def sdpa_masked(q, k, v, bias=None):
    return sdpa(q, k, v, attn_mask=bias)


@pytest.mark.parametrize(
    ("dtype", "bias", "kernel"),
    [
        (torch.bfloat16, None, "triton"),
        (torch.bfloat16, torch.float32, "aten_math"),
        (torch.bfloat16, torch.bool, "aten_math"),
        (torch.float64, None, "aten_math"),
    ],
)
def test_the_kernel_under_a_mask_on_a_gpu(mesh, dtype, bias, kernel):
    """As the operators choose it: key ranges and segment ids run in the templates."""

    def windowed(q, k, v, bias):
        i = torch.arange(q.shape[2])
        seen = (i[:, None] - i).abs() < 8
        return sdpa(q, k, v, attn_mask=seen if bias is None else bias)

    qkv = [torch.empty(1, 2, 64, 16, dtype=dtype) for _ in range(3)]
    if bias is not None:
        bias = torch.empty(64, 64, dtype=dtype if bias.is_floating_point else bias)
    captured = planned(windowed, *qkv, bias, mesh=mesh, shard=QKV)
    on_gpu = mock.Mock(wraps=captured.ctx.mesh, device_type="cuda")
    ctx = dataclasses.replace(captured.ctx, mesh=on_gpu)
    with mock.patch.object(choice, "_has_triton", return_value=True):
        (call,) = GraphReport.of(ctx, (), "f").calls
    assert call.kernel == kernel


def layers(x, words):
    """A decoder, an encoder, one with a single key head, and attention to a text."""
    causal = sdpa(x, x, x, is_causal=True)
    full = sdpa(causal, x, x)
    grouped = sdpa(full, x[:, :1], x[:, :1], enable_gqa=True)
    return sdpa(grouped, words, words)


def test_every_layer_has_its_own(mesh):
    x, words = (
        torch.empty((1, 32, n, 128), dtype=torch.bfloat16) for n in (131072, 512)
    )
    captured = planned(
        layers, x, words, strategy="auto", mesh=mesh, shard={"x": 2, "words": 2}
    )
    rows = []
    for call, plan in captured.ctx.findings.plans.items():
        best, other = plan.chosen, plan.runner_up
        rows.append(
            f"{call.q_shape[1]}:{call.k_shape[1]} heads, {call.k_shape[2]} keys: "
            f"{best.label} {1e3 * best.seconds:.2f} ms, "
            f"then {other.label} {1e3 * other.seconds:.2f} ms"
        )
    assert_golden(
        "\n".join(rows),
        """\
32:32 heads, 131072 keys: ulysses 53.27 ms, then hybrid 2 (ring) in 4 57.70 ms
32:32 heads, 131072 keys: ring 98.31 ms, then ulysses 96.05 ms
32:1 heads, 131072 keys: all_gather 94.15 ms, then ring 95.67 ms
32:32 heads, 512 keys: latents 0.48 ms, then all_gather 0.51 ms""",
    )
