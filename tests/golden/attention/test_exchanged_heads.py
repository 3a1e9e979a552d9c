"""Ulysses and hybrid: what is inserted, and what AOTAutograd sees of it."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from cpcompile.kernels import choice
from cpcompile.passes.graph.readable import readable
from cpcompile.ranks.mesh_factors import hybrid_groups
from tests.golden.capture import capture
from tests.golden.golden_text import assert_golden, lines_with
from tests.golden.operands import QKV
from tests.golden.ring_graphs import expand, text, traced


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_ulysses_on_plain_inputs(mesh):
    captured = capture(
        attend,
        *torch.randn(3, 2, 4, 16, 8),
        strategy="ulysses",
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
ulysses_attention_default = cp.ulysses_attention(l_q_, l_k_, l_v_, sizes=[16, 16],
    spec='causal scale=0.353553', group=GROUP)
getitem = ulysses_attention_default[0]  # [2, 4, 16, 8]
return (getitem,)""",
    )


@pytest.mark.parametrize("inner", ["ulysses", "ring"])
def test_hybrid_on_plain_inputs(mesh, inner):
    """The mesh axis called "ulysses" exchanges heads; the other one is the ring."""
    names = ("ring", "ulysses") if inner == "ulysses" else ("ulysses", "ring")
    given = {"mesh": init_device_mesh("cpu", (4, 2), mesh_dim_names=names)}
    given |= {"axis": names, "strategy": "hybrid", "shard": QKV}
    captured = capture(attend, *torch.randn(3, 2, 4, 16, 8), **given)
    step = captured["insert_attention"]
    assert step.rewrites == 1
    groups = hybrid_groups(
        captured.ctx.mesh,
        0,
        next(iter(captured.ctx.findings.plans.values())).chosen.degrees,
    )
    assert groups.ring == given["mesh"].get_group("ring").group_name
    assert groups.ulysses == given["mesh"].get_group("ulysses").group_name
    assert_golden(
        step.after.replace(str(inner == "ulysses") + ")", "INNER)"),
        """\
l_q_ = input  # [2, 4, 16, 8]
l_k_ = input  # [2, 4, 16, 8]
l_v_ = input  # [2, 4, 16, 8]
hybrid_attention_default = cp.hybrid_attention(l_q_, l_k_, l_v_, sizes=[16, 16],
    spec='causal scale=0.353553', group=GROUP, ulysses_group=ULYSSES, ring_group=RING,
    ulysses_inner=INNER)
getitem = hybrid_attention_default[0]  # [2, 4, 16, 8]
return (getitem,)""",
    )


def test_ulysses():
    """Rank 1 of 2: each has one of two query heads, and the one key head."""
    forward, backward = traced(strategy="ulysses", kv_heads=1)
    assert_golden(
        text(forward),
        """\
ulysses_scatter = cp.ulysses_scatter([primals_1, primals_2, primals_3],
    lengths=[16, 16, 16], sizes=[8, 8, 8], group=GROUP)
_scaled_dot_product_flash_attention_for_cpu =
    aten._scaled_dot_product_flash_attention_for_cpu(ulysses_scatter[0],
    ulysses_scatter[1], ulysses_scatter[2], is_causal=True, scale=0.5)
ulysses_gather = cp.ulysses_gather([_scaled_dot_product_flash_attention_for_cpu[0]],
    heads=[2], lengths=[16], sizes=[8], group=GROUP)
return (ulysses_gather[0], ulysses_scatter[0], ulysses_scatter[1], ulysses_scatter[2],
    _scaled_dot_product_flash_attention_for_cpu[1],
    _scaled_dot_product_flash_attention_for_cpu[0])""",
    )
    assert_golden(
        text(backward),
        """\
ulysses_scatter_1 = cp.ulysses_scatter([tangents_1], lengths=[16], sizes=[8],
    group=GROUP)
_scaled_dot_product_flash_attention_for_cpu_backward =
    aten._scaled_dot_product_flash_attention_for_cpu_backward(ulysses_scatter_1[0],
    getitem, getitem_1, getitem_2, detach, getitem_4, dropout_p=0, is_causal=True,
    scale=0.5)
ulysses_gather_1 =
    cp.ulysses_gather([_scaled_dot_product_flash_attention_for_cpu_backward[0],
    _scaled_dot_product_flash_attention_for_cpu_backward[1],
    _scaled_dot_product_flash_attention_for_cpu_backward[2]], heads=[2, 1, 1],
    lengths=[16, 16, 16], sizes=[8, 8, 8], group=GROUP)
return (ulysses_gather_1[0], ulysses_gather_1[1], ulysses_gather_1[2])""",
    )


def test_ulysses_has_no_ring():
    for graph in traced(strategy="ulysses"):
        before = readable(graph)
        assert expand(graph) == 0
        assert readable(graph) == before


def test_hybrid():
    """Rank 1 of 4, of which two consecutive ones exchange heads."""
    forward, backward = traced(1, 4, strategy="hybrid", inner="ulysses")
    assert_golden(
        text(forward),
        """\
ulysses_scatter = cp.ulysses_scatter([primals_1, primals_2, primals_3],
    lengths=[8, 8, 8], sizes=[4, 4, 4], group=ULYSSES)
ring_attention = cp.ring_attention(ulysses_scatter[0], ulysses_scatter[1],
    ulysses_scatter[2], sizes=[16, 16, 1, 8, 8], spec='causal scale=0.5', group=RING)
ulysses_gather = cp.ulysses_gather([ring_attention[0]], heads=[2], lengths=[8],
    sizes=[4], group=ULYSSES)
return (ulysses_gather[0], ulysses_scatter[0], ulysses_scatter[1], ulysses_scatter[2],
    ring_attention[0], ring_attention[1])""",
    )
    assert_golden(
        text(backward),
        """\
ulysses_scatter_1 = cp.ulysses_scatter([tangents_1], lengths=[8], sizes=[4],
    group=ULYSSES)
ring_attention_backward = cp.ring_attention_backward(ulysses_scatter_1[0], q, k, v, out,
    lse, sizes=[16, 16, 1, 8, 8], spec='causal scale=0.5', group=RING, bias_grad=False)
ulysses_gather_1 = cp.ulysses_gather([ring_attention_backward[0],
    ring_attention_backward[1], ring_attention_backward[2]], heads=[2, 2, 2],
    lengths=[8, 8, 8], sizes=[4, 4, 4], group=ULYSSES)
return (ulysses_gather_1[0], ulysses_gather_1[1], ulysses_gather_1[2])""",
    )


def test_the_ring_of_a_hybrid():
    """Rank 3 of 4, the ring inside: two runs of queries have a chain of steps each."""
    forward, _ = traced(3, 4, strategy="hybrid", inner="ring")
    assert expand(forward, 3, 4, inner="ring") == 1
    assert_golden(
        text(forward),
        """\
ulysses_scatter = cp.ulysses_scatter([primals_1, primals_2, primals_3],
    lengths=[8, 8, 8], sizes=[4, 4, 4], group=ULYSSES)
split_with_sizes = aten.split_with_sizes(ulysses_scatter[0], split_sizes=[4, 4], dim=2)
shift = cp.ring_shift([ulysses_scatter[1], ulysses_scatter[2]], group=RING,
    where='keys and values, step 0')
step = cp.attention_step(split_with_sizes[0], ulysses_scatter[1], ulysses_scatter[2],
    keys=[0, 4], upper=[1, 1], spec='scale=0.5', final=False, kernel='aten_flash',
    after=shift[0])
step_1 = cp.attention_step(split_with_sizes[1], ulysses_scatter[1], ulysses_scatter[2],
    upper=[5, 5], spec='scale=0.5', final=False, kernel='aten_flash', after=step[0])
wait = cp.ring_wait(shift[0], step_1[0], where='keys and values, step 0')
wait_1 = cp.ring_wait(shift[1], step_1[0], where='keys and values, step 0')
step_2 = cp.attention_step(split_with_sizes[0], wait, wait_1, step[0], step[1],
    keys=[0, 4], spec='scale=0.5', final=True, kernel='aten_flash')
step_3 = cp.attention_step(split_with_sizes[1], wait, wait_1, step_1[0], step_1[1],
    spec='scale=0.5', final=True, kernel='aten_flash', after=step_2[0])
cat = aten.cat([step_2[0], step_3[0]], dim=2)
cat_1 = aten.cat([step_2[1], step_3[1]], dim=2)
ulysses_gather = cp.ulysses_gather([cat], heads=[2], lengths=[8], sizes=[4],
    group=ULYSSES)
return (ulysses_gather[0], ulysses_scatter[0], ulysses_scatter[1], ulysses_scatter[2],
    cat, cat_1)""",
    )


def test_the_backward_of_the_ring_of_a_hybrid(monkeypatch):
    """As the templates do it: dK and dV travel while dQ of both runs is computed."""
    monkeypatch.setattr(choice, "_has_triton", lambda: True)
    _, backward = traced(3, 4, strategy="hybrid", inner="ring")
    assert expand(backward, 3, 4, kernel="triton", inner="ring") == 1
    calls = lines_with(text(backward), "= cp.").replace("split_with_sizes", "part")
    for alike in (" spec='scale=0.5',", " kernel='triton',"):
        assert calls.count(alike) == calls.count("= cp.attention_step") == 8
        calls = calls.replace(alike, "")
    assert_golden(
        lines_with(calls, "= cp.ring_wait", "= cp.ulysses"),
        """\
ulysses_scatter_1 = cp.ulysses_scatter([tangents_1], lengths=[8], sizes=[4],
    group=ULYSSES)
wait = cp.ring_wait(shift[0], step_backward_3[0], where='keys and values, step 0')
wait_1 = cp.ring_wait(shift[1], step_backward_3[0], where='keys and values, step 0')
wait_2 = cp.ring_wait(shift_1[0], step_backward_3[0], where='dk and dv, step 0')
wait_3 = cp.ring_wait(shift_1[1], step_backward_3[0], where='dk and dv, step 0')
wait_4 = cp.ring_wait(shift_2[0], step_backward_7[0], where='dk and dv, step 1')
wait_5 = cp.ring_wait(shift_2[1], step_backward_7[0], where='dk and dv, step 1')
ulysses_gather_1 =
    cp.ulysses_gather([cat, convert_element_type, convert_element_type_1],
    heads=[2, 2, 2], lengths=[8, 8, 8], sizes=[4, 4, 4], group=ULYSSES)""",
    )
    assert_golden(
        lines_with(calls, "= cp.ring_shift", "= cp.attention_step"),
        """\
shift = cp.ring_shift([k, v], group=RING, where='keys and values, step 0')
step_backward = cp.attention_step_backward(part[0], part_1[0], k, v, part_2[0],
    part_3[0], parts='dkdv', keys=[0, 4], upper=[1, 1], final=False, after=shift[0])
step_backward_1 = cp.attention_step_backward(part[1], part_1[1], k, v, part_2[1],
    part_3[1], [step_backward[0], step_backward[1]], parts='dkdv', upper=[5, 5],
    final=False, after=shift[0])
shift_1 = cp.ring_shift([step_backward_1[0], step_backward_1[1]], group=RING,
    where='dk and dv, step 0')
step_backward_2 = cp.attention_step_backward(part[0], part_1[0], k, v, part_2[0],
    part_3[0], parts='dq', keys=[0, 4], upper=[1, 1], final=False, after=shift_1[0])
step_backward_3 = cp.attention_step_backward(part[1], part_1[1], k, v, part_2[1],
    part_3[1], parts='dq', upper=[5, 5], final=False, after=step_backward_2[0])
step_backward_4 = cp.attention_step_backward(part[0], part_1[0], wait, wait_1,
    part_2[0], part_3[0], [wait_2, wait_3], parts='dkdv', keys=[0, 4], final=False,
    after=shift_1[0])
step_backward_5 = cp.attention_step_backward(part[1], part_1[1], wait, wait_1,
    part_2[1], part_3[1], [step_backward_4[0], step_backward_4[1]], parts='dkdv',
    final=False, after=shift_1[0])
shift_2 = cp.ring_shift([step_backward_5[0], step_backward_5[1]], group=RING,
    where='dk and dv, step 1')
step_backward_6 = cp.attention_step_backward(part[0], part_1[0], wait, wait_1,
    part_2[0], part_3[0], [step_backward_2[0]], parts='dq', keys=[0, 4], final=True,
    after=shift_2[0])
step_backward_7 = cp.attention_step_backward(part[1], part_1[1], wait, wait_1,
    part_2[1], part_3[1], [step_backward_3[0]], parts='dq', final=True,
    after=step_backward_6[0])""",
    )


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize(("limit", "count"), [(2, 1), (1, 0)])
def test_the_limit_is_that_of_the_ring(direction, limit, count):
    """Two ranks are in the ring of four ranks."""
    graph = traced(1, 4, strategy="hybrid", inner="ring")[direction]
    assert expand(graph, 1, 4, limit=limit, inner="ring") == count
