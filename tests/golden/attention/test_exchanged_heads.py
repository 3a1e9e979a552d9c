"""Ulysses and hybrid: what is inserted, and what AOTAutograd sees of it."""
# ruff: noqa: E501  graphs as text have long lines

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch.distributed.device_mesh import init_device_mesh

from cpcompile.kernels import choice
from cpcompile.ranks.mesh_factors import hybrid_groups
from tests.golden.capture import capture
from tests.golden.operands import QKV
from tests.golden.ring_graphs import expand, text, traced


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_ulysses_on_plain_inputs(mesh):
    captured = capture(
        attend, *torch.randn(3, 2, 4, 16, 8), strategy="ulysses", mesh=mesh, shard=QKV
    )
    step = captured["insert_attention"]
    assert step.rewrites == 1
    assert_expected_inline(
        step.after,
        """\
l_q_ = input  # [2, 4, 16, 8]
l_k_ = input  # [2, 4, 16, 8]
l_v_ = input  # [2, 4, 16, 8]
ulysses_attention_default = cp.ulysses_attention.default(l_q_, l_k_, l_v_, 16, 16, True, 0.353553, GROUP)  # [2, 4, 16, 8]
return (ulysses_attention_default,)""",
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
        captured.ctx.mesh, 0, next(iter(captured.ctx.plans.values())).chosen.degrees
    )
    assert groups.ring == given["mesh"].get_group("ring").group_name
    assert groups.ulysses == given["mesh"].get_group("ulysses").group_name
    assert_expected_inline(
        step.after.replace(str(inner == "ulysses") + ")", "INNER)"),
        """\
l_q_ = input  # [2, 4, 16, 8]
l_k_ = input  # [2, 4, 16, 8]
l_v_ = input  # [2, 4, 16, 8]
hybrid_attention_default = cp.hybrid_attention.default(l_q_, l_k_, l_v_, 16, 16, True, 0.353553, GROUP, ULYSSES, RING, INNER)  # [2, 4, 16, 8]
return (hybrid_attention_default,)""",
    )


def test_ulysses():
    """Rank 1 of 2: each has one of two query heads, and the one key head."""
    forward, backward = traced(strategy="ulysses", kv_heads=1)
    assert_expected_inline(
        text(forward),
        """\
view = aten.view(primals_1, [1, 2, 8, 4])
view_1 = aten.view(primals_2, [1, 1, 8, 4])
view_2 = aten.view(primals_3, [1, 1, 8, 4])
view_3 = aten.view(view, [1, 2, 8, 4])
view_4 = aten.view(view_1, [1, 1, 8, 4])
view_5 = aten.view(view_2, [1, 1, 8, 4])
ulysses_scatter = cp.ulysses_scatter([view_3, view_4, view_5], [16, 16, 16], [8, 8, 8], '0')
_scaled_dot_product_flash_attention_for_cpu = aten._scaled_dot_product_flash_attention_for_cpu(ulysses_scatter[0], ulysses_scatter[1], ulysses_scatter[2], 0.0, True)
detach = aten.detach(_scaled_dot_product_flash_attention_for_cpu[0])
ulysses_gather = cp.ulysses_gather([_scaled_dot_product_flash_attention_for_cpu[0]], [2], [16], [8], '0')
view_6 = aten.view(ulysses_gather[0], [1, 2, 8, 4])
view_7 = aten.view(view_6, [1, 2, 8, 4])
return [view_7, ulysses_scatter[0], ulysses_scatter[1], ulysses_scatter[2], _scaled_dot_product_flash_attention_for_cpu[1], detach]""",
    )
    assert_expected_inline(
        text(backward),
        """\
view_8 = aten.view(tangents_1, [1, 2, 8, 4])
ulysses_scatter_1 = cp.ulysses_scatter([view_8], [16], [8], '0')
detach_1 = aten.detach(detach)
_scaled_dot_product_flash_attention_for_cpu_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward(ulysses_scatter_1[0], getitem, getitem_1, getitem_2, detach_1, getitem_4, 0.0, True)
ulysses_gather_1 = cp.ulysses_gather([_scaled_dot_product_flash_attention_for_cpu_backward[0], _scaled_dot_product_flash_attention_for_cpu_backward[1], _scaled_dot_product_flash_attention_for_cpu_backward[2]], [2, 1, 1], [16, 16, 16], [8, 8, 8], '0')
view_9 = aten.view(ulysses_gather_1[2], [1, 1, 8, 4])
view_10 = aten.view(ulysses_gather_1[1], [1, 1, 8, 4])
view_11 = aten.view(ulysses_gather_1[0], [1, 2, 8, 4])
return [view_11, view_10, view_9]""",
    )


def test_ulysses_has_no_ring():
    for graph in traced(strategy="ulysses"):
        before = text(graph)
        assert expand(graph) == 0
        assert text(graph) == before


def test_hybrid():
    """Rank 1 of 4, of which two consecutive ones exchange heads."""
    forward, backward = traced(1, 4, strategy="hybrid", inner="ulysses")
    assert_expected_inline(
        text(forward),
        """\
view = aten.view(primals_1, [1, 2, 4, 4])
view_1 = aten.view(primals_2, [1, 2, 4, 4])
view_2 = aten.view(primals_3, [1, 2, 4, 4])
view_3 = aten.view(view, [1, 2, 4, 4])
view_4 = aten.view(view_1, [1, 2, 4, 4])
view_5 = aten.view(view_2, [1, 2, 4, 4])
ulysses_scatter = cp.ulysses_scatter([view_3, view_4, view_5], [8, 8, 8], [4, 4, 4], '3')
ring_attention = cp.ring_attention(ulysses_scatter[0], ulysses_scatter[1], ulysses_scatter[2], 16, 16, True, 0.5, '2', 1, 8, 8)
detach = aten.detach(ring_attention[0])
ulysses_gather = cp.ulysses_gather([ring_attention[0]], [2], [8], [4], '3')
view_6 = aten.view(ulysses_gather[0], [1, 2, 4, 4])
view_7 = aten.view(view_6, [1, 2, 4, 4])
return [view_7, ulysses_scatter[0], ulysses_scatter[1], ulysses_scatter[2], ring_attention[1], detach]""",
    )
    assert_expected_inline(
        text(backward),
        """\
view_8 = aten.view(tangents_1, [1, 2, 4, 4])
ulysses_scatter_1 = cp.ulysses_scatter([view_8], [8], [4], '3')
detach_1 = aten.detach(detach)
ring_attention_backward = cp.ring_attention_backward(ulysses_scatter_1[0], getitem, getitem_1, getitem_2, detach_1, getitem_4, 16, 16, True, 0.5, '2', 1, 8, 8)
ulysses_gather_1 = cp.ulysses_gather([ring_attention_backward[0], ring_attention_backward[1], ring_attention_backward[2]], [2, 2, 2], [8, 8, 8], [4, 4, 4], '3')
view_9 = aten.view(ulysses_gather_1[2], [1, 2, 4, 4])
view_10 = aten.view(ulysses_gather_1[1], [1, 2, 4, 4])
view_11 = aten.view(ulysses_gather_1[0], [1, 2, 4, 4])
return [view_11, view_10, view_9]""",
    )


def test_the_ring_of_a_hybrid():
    """Rank 3 of 4, the ring inside: two runs of queries have a chain of steps each."""
    forward, _ = traced(3, 4, strategy="hybrid", inner="ring")
    assert expand(forward, 3, 4, inner="ring") == 1
    assert_expected_inline(
        text(forward),
        """\
view = aten.view(primals_1, [1, 2, 4, 4])
view_1 = aten.view(primals_2, [1, 2, 4, 4])
view_2 = aten.view(primals_3, [1, 2, 4, 4])
view_3 = aten.view(view, [1, 2, 4, 4])
view_4 = aten.view(view_1, [1, 2, 4, 4])
view_5 = aten.view(view_2, [1, 2, 4, 4])
ulysses_scatter = cp.ulysses_scatter([view_3, view_4, view_5], [8, 8, 8], [4, 4, 4], '2')
split_with_sizes = aten.split_with_sizes(ulysses_scatter[0], [4, 4], 2)
ring_shift = cp.ring_shift([ulysses_scatter[1], ulysses_scatter[2]], '4', 'keys and values, step 0')
attention_step = cp.attention_step(split_with_sizes[0], ulysses_scatter[1], ulysses_scatter[2], None, None, None, None, [], [0, 4], [1, 1], [], 0.5, False, 'aten_flash', ring_shift[0])
attention_step_1 = cp.attention_step(split_with_sizes[1], ulysses_scatter[1], ulysses_scatter[2], None, None, None, None, [], [], [5, 5], [], 0.5, False, 'aten_flash', attention_step[0])
ring_wait = cp.ring_wait(ring_shift[0], attention_step_1[0], 'keys and values, step 0')
ring_wait_1 = cp.ring_wait(ring_shift[1], attention_step_1[0], 'keys and values, step 0')
attention_step_2 = cp.attention_step(split_with_sizes[0], ring_wait, ring_wait_1, attention_step[0], attention_step[1], None, None, [], [0, 4], [], [], 0.5, True, 'aten_flash')
attention_step_3 = cp.attention_step(split_with_sizes[1], ring_wait, ring_wait_1, attention_step_1[0], attention_step_1[1], None, None, [], [], [], [], 0.5, True, 'aten_flash', attention_step_2[0])
cat = aten.cat([attention_step_2[0], attention_step_3[0]], 2)
cat_1 = aten.cat([attention_step_2[1], attention_step_3[1]], 2)
detach = aten.detach(cat)
ulysses_gather = cp.ulysses_gather([cat], [2], [8], [4], '2')
view_6 = aten.view(ulysses_gather[0], [1, 2, 4, 4])
view_7 = aten.view(view_6, [1, 2, 4, 4])
return [view_7, ulysses_scatter[0], ulysses_scatter[1], ulysses_scatter[2], cat_1, detach]""",
    )


def test_the_backward_of_the_ring_of_a_hybrid(monkeypatch):
    """As the templates do it: dK and dV travel while dQ of both runs is computed."""
    monkeypatch.setattr(choice, "_has_triton", lambda: True)
    _, backward = traced(3, 4, strategy="hybrid", inner="ring")
    assert expand(backward, 3, 4, kernel="triton", inner="ring") == 1
    lines = [x for x in text(backward).splitlines() if "= cp." in x]
    assert_expected_inline(
        "\n".join(lines),
        """\
ulysses_scatter_1 = cp.ulysses_scatter([view_8], [8], [4], '2')
ring_shift = cp.ring_shift([getitem_1, getitem_2], '4', 'keys and values, step 0')
attention_step_dkdv = cp.attention_step_dkdv(split_with_sizes[0], split_with_sizes_1[0], getitem_1, getitem_2, split_with_sizes_2[0], split_with_sizes_3[0], None, None, None, None, [], [0, 4], [1, 1], [], 0.5, False, 'triton', ring_shift[0])
attention_step_dkdv_1 = cp.attention_step_dkdv(split_with_sizes[1], split_with_sizes_1[1], getitem_1, getitem_2, split_with_sizes_2[1], split_with_sizes_3[1], attention_step_dkdv[0], attention_step_dkdv[1], None, None, [], [], [5, 5], [], 0.5, False, 'triton', ring_shift[0])
ring_shift_1 = cp.ring_shift([attention_step_dkdv_1[0], attention_step_dkdv_1[1]], '4', 'dk and dv, step 0')
attention_step_dq = cp.attention_step_dq(split_with_sizes[0], split_with_sizes_1[0], getitem_1, getitem_2, split_with_sizes_2[0], split_with_sizes_3[0], None, None, None, [], [0, 4], [1, 1], [], 0.5, False, 'triton', ring_shift_1[0])
attention_step_dq_1 = cp.attention_step_dq(split_with_sizes[1], split_with_sizes_1[1], getitem_1, getitem_2, split_with_sizes_2[1], split_with_sizes_3[1], None, None, None, [], [], [5, 5], [], 0.5, False, 'triton', attention_step_dq)
ring_wait = cp.ring_wait(ring_shift[0], attention_step_dq_1, 'keys and values, step 0')
ring_wait_1 = cp.ring_wait(ring_shift[1], attention_step_dq_1, 'keys and values, step 0')
ring_wait_2 = cp.ring_wait(ring_shift_1[0], attention_step_dq_1, 'dk and dv, step 0')
ring_wait_3 = cp.ring_wait(ring_shift_1[1], attention_step_dq_1, 'dk and dv, step 0')
attention_step_dkdv_2 = cp.attention_step_dkdv(split_with_sizes[0], split_with_sizes_1[0], ring_wait, ring_wait_1, split_with_sizes_2[0], split_with_sizes_3[0], ring_wait_2, ring_wait_3, None, None, [], [0, 4], [], [], 0.5, False, 'triton', ring_shift_1[0])
attention_step_dkdv_3 = cp.attention_step_dkdv(split_with_sizes[1], split_with_sizes_1[1], ring_wait, ring_wait_1, split_with_sizes_2[1], split_with_sizes_3[1], attention_step_dkdv_2[0], attention_step_dkdv_2[1], None, None, [], [], [], [], 0.5, False, 'triton', ring_shift_1[0])
ring_shift_2 = cp.ring_shift([attention_step_dkdv_3[0], attention_step_dkdv_3[1]], '4', 'dk and dv, step 1')
attention_step_dq_2 = cp.attention_step_dq(split_with_sizes[0], split_with_sizes_1[0], ring_wait, ring_wait_1, split_with_sizes_2[0], split_with_sizes_3[0], attention_step_dq, None, None, [], [0, 4], [], [], 0.5, True, 'triton', ring_shift_2[0])
attention_step_dq_3 = cp.attention_step_dq(split_with_sizes[1], split_with_sizes_1[1], ring_wait, ring_wait_1, split_with_sizes_2[1], split_with_sizes_3[1], attention_step_dq_1, None, None, [], [], [], [], 0.5, True, 'triton', attention_step_dq_2)
ring_wait_4 = cp.ring_wait(ring_shift_2[0], attention_step_dq_3, 'dk and dv, step 1')
ring_wait_5 = cp.ring_wait(ring_shift_2[1], attention_step_dq_3, 'dk and dv, step 1')
ulysses_gather_1 = cp.ulysses_gather([cat, convert_element_type, convert_element_type_1], [2, 2, 2], [8, 8, 8], [4, 4, 4], '2')""",
    )


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize(("limit", "count"), [(2, 1), (1, 0)])
def test_the_limit_is_that_of_the_ring(direction, limit, count):
    """Two ranks are in the ring of four ranks."""
    graph = traced(1, 4, strategy="hybrid", inner="ring")[direction]
    assert expand(graph, 1, 4, limit=limit, inner="ring") == count
