"""Rings of few ranks become shifts, steps and waits, in the order that hides them."""
# ruff: noqa: E501  graphs as text have long lines

import pytest
import torch
from expecttest import assert_expected_inline

from cpcompile import config
from cpcompile.kernels import choice
from cpcompile.passes.attention import expand_ring as module
from cpcompile.passes.attention.expand_ring import RINGS, Unrolling, expand_ring
from tests.golden.capture import fake_group
from tests.golden.ring_graphs import SHIFT, expand, text, traced


def test_forward():
    graph, _ = traced()
    assert_expected_inline(
        text(graph),
        """\
view = aten.view(primals_1, [1, 2, 8, 4])
view_1 = aten.view(primals_2, [1, 2, 8, 4])
view_2 = aten.view(primals_3, [1, 2, 8, 4])
ring_attention = cp.ring_attention(view, view_1, view_2, 16, 16, True, 0.5, '0')
detach = aten.detach(ring_attention[0])
view_3 = aten.view(ring_attention[0], [1, 2, 8, 4])
return [view_3, view, view_1, view_2, ring_attention[1], detach]""",
    )
    assert expand(graph) == 1
    assert_expected_inline(
        text(graph),
        """\
view = aten.view(primals_1, [1, 2, 8, 4])
view_1 = aten.view(primals_2, [1, 2, 8, 4])
view_2 = aten.view(primals_3, [1, 2, 8, 4])
ring_shift = cp.ring_shift([view_1, view_2], '0', 'keys and values, step 0')
attention_step = cp.attention_step(view, view_1, view_2, None, None, None, None, [], [], [1, 1], [], 0.5, False, 'aten_flash', ring_shift[0])
ring_wait = cp.ring_wait(ring_shift[0], attention_step[0], 'keys and values, step 0')
ring_wait_1 = cp.ring_wait(ring_shift[1], attention_step[0], 'keys and values, step 0')
attention_step_1 = cp.attention_step(view, ring_wait, ring_wait_1, attention_step[0], attention_step[1], None, None, [], [], [], [], 0.5, True, 'aten_flash')
detach = aten.detach(attention_step_1[0])
view_3 = aten.view(attention_step_1[0], [1, 2, 8, 4])
return [view_3, view, view_1, view_2, attention_step_1[1], detach]""",
    )


def test_backward():
    """aten's kernels: dq, dk and dv together."""
    _, graph = traced()
    assert expand(graph) == 1
    assert_expected_inline(
        text(graph),
        """\
view_4 = aten.view(tangents_1, [1, 2, 8, 4])
detach_1 = aten.detach(detach)
ring_shift = cp.ring_shift([view_1, view_2], '0', 'keys and values, step 0')
attention_step_backward = cp.attention_step_backward(view_4, view, view_1, view_2, detach_1, getitem_1, None, [], [], [1, 1], [], 0.5, False, 'aten_flash', ring_shift[0])
ring_shift_1 = cp.ring_shift([attention_step_backward[1], attention_step_backward[2]], '0', 'dk and dv, step 0')
ring_wait = cp.ring_wait(ring_shift[0], attention_step_backward[0], 'keys and values, step 0')
ring_wait_1 = cp.ring_wait(ring_shift[1], attention_step_backward[0], 'keys and values, step 0')
attention_step_backward_1 = cp.attention_step_backward(view_4, view, ring_wait, ring_wait_1, detach_1, getitem_1, attention_step_backward[0], [], [], [], [], 0.5, True, 'aten_flash', ring_shift_1[0])
ring_wait_2 = cp.ring_wait(ring_shift_1[0], attention_step_backward_1[0], 'dk and dv, step 0')
ring_wait_3 = cp.ring_wait(ring_shift_1[1], attention_step_backward_1[0], 'dk and dv, step 0')
add = aten.add.Tensor(ring_wait_2, attention_step_backward_1[1])
add_1 = aten.add.Tensor(ring_wait_3, attention_step_backward_1[2])
ring_shift_2 = cp.ring_shift([add, add_1], '0', 'dk and dv, step 1, behind no step')
ring_wait_4 = cp.ring_wait(ring_shift_2[0], attention_step_backward_1[0], 'dk and dv, step 1, behind no step')
ring_wait_5 = cp.ring_wait(ring_shift_2[1], attention_step_backward_1[0], 'dk and dv, step 1, behind no step')
slice_1 = aten.slice.Tensor(ring_wait_4, 2, 0, 8)
convert_element_type = prims.convert_element_type(slice_1, torch.float32)
slice_2 = aten.slice.Tensor(ring_wait_5, 2, 0, 8)
convert_element_type_1 = prims.convert_element_type(slice_2, torch.float32)
return [attention_step_backward_1[0], convert_element_type, convert_element_type_1]""",
    )


def test_backward_of_the_templates(monkeypatch):
    """dK and dV travel while dQ is computed."""
    monkeypatch.setattr(choice, "_has_triton", lambda: True)
    _, graph = traced()
    assert expand(graph, kernel="triton") == 1
    assert_expected_inline(
        text(graph),
        """\
view_4 = aten.view(tangents_1, [1, 2, 8, 4])
detach_1 = aten.detach(detach)
mul = aten.mul.Tensor(view_4, detach_1)
sum_1 = aten.sum.dim_IntList(mul, [-1])
ring_shift = cp.ring_shift([view_1, view_2], '0', 'keys and values, step 0')
attention_step_dkdv = cp.attention_step_dkdv(view_4, view, view_1, view_2, getitem_1, sum_1, None, None, None, None, [], [], [1, 1], [], 0.5, False, 'triton', ring_shift[0])
ring_shift_1 = cp.ring_shift([attention_step_dkdv[0], attention_step_dkdv[1]], '0', 'dk and dv, step 0')
attention_step_dq = cp.attention_step_dq(view_4, view, view_1, view_2, getitem_1, sum_1, None, None, None, [], [], [1, 1], [], 0.5, False, 'triton', ring_shift_1[0])
ring_wait = cp.ring_wait(ring_shift[0], attention_step_dq, 'keys and values, step 0')
ring_wait_1 = cp.ring_wait(ring_shift[1], attention_step_dq, 'keys and values, step 0')
ring_wait_2 = cp.ring_wait(ring_shift_1[0], attention_step_dq, 'dk and dv, step 0')
ring_wait_3 = cp.ring_wait(ring_shift_1[1], attention_step_dq, 'dk and dv, step 0')
attention_step_dkdv_1 = cp.attention_step_dkdv(view_4, view, ring_wait, ring_wait_1, getitem_1, sum_1, ring_wait_2, ring_wait_3, None, None, [], [], [], [], 0.5, False, 'triton', ring_shift_1[0])
ring_shift_2 = cp.ring_shift([attention_step_dkdv_1[0], attention_step_dkdv_1[1]], '0', 'dk and dv, step 1')
attention_step_dq_1 = cp.attention_step_dq(view_4, view, ring_wait, ring_wait_1, getitem_1, sum_1, attention_step_dq, None, None, [], [], [], [], 0.5, True, 'triton', ring_shift_2[0])
ring_wait_4 = cp.ring_wait(ring_shift_2[0], attention_step_dq_1, 'dk and dv, step 1')
ring_wait_5 = cp.ring_wait(ring_shift_2[1], attention_step_dq_1, 'dk and dv, step 1')
slice_1 = aten.slice.Tensor(ring_wait_4, 2, 0, 8)
convert_element_type = prims.convert_element_type(slice_1, torch.float32)
slice_2 = aten.slice.Tensor(ring_wait_5, 2, 0, 8)
convert_element_type_1 = prims.convert_element_type(slice_2, torch.float32)
return [attention_step_dq_1, convert_element_type, convert_element_type_1]""",
    )


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize(
    ("strategy", "limit"), [("ring", 3), ("ring", 0), ("all_gather", 8)]
)
def test_larger_rings_and_gathered_attention_stay(direction, strategy, limit):
    graph = traced(1, 4, strategy=strategy)[direction]
    before = text(graph)
    assert f"cp.{strategy}_attention" in before
    assert expand(graph, 1, 4, limit=limit) == 0
    assert text(graph) == before


def test_a_ring_of_one_rank_is_a_step():
    forward, backward = traced(0, 1)
    assert expand(forward, 0, 1) == expand(backward, 0, 1) == 1
    for graph in (forward, backward):
        names = [str(node.target) for node in graph.nodes]
        assert not any("ring" in name for name in names)
        assert sum("cp.attention_step" in name for name in names) == 1


def test_every_ring_counts():
    forward, backward = traced(layers=3)
    assert expand(forward) == expand(backward) == 3
    for graph, shifts in ((forward, 1), (backward, 1 + 2)):
        assert not any(node.target in RINGS for node in graph.nodes)
        found = graph.find_nodes(op="call_function", target=SHIFT)
        assert len(found) == 3 * shifts


def test_the_kernel_of_each_ring_is_asked_for():
    graph, _ = traced(layers=2)
    rings = graph.find_nodes(
        op="call_function", target=torch.ops.cp.ring_attention.default
    )
    kernels = dict(zip(rings, ("aten_math", "aten_flash"), strict=True))
    with fake_group(1, 2):
        assert expand_ring(graph, Unrolling(8, kernels.__getitem__)) == 2
    steps = graph.find_nodes(
        op="call_function", target=torch.ops.cp.attention_step.default
    )
    assert [next(a for a in x.args if isinstance(a, str)) for x in steps] == [
        *["aten_math"] * 2,
        *["aten_flash"] * 2,
    ]
    assert config.step_kernel == "auto"


@pytest.mark.core(every=3)
@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize(("steps", "count"), [(6, 3), (5, 0), (0, 0)])
def test_by_itself_it_unrolls_all_of_them_or_none(monkeypatch, direction, steps, count):
    """Three rings of two ranks are six steps."""
    monkeypatch.setattr(module, "AUTO_STEPS", steps)
    graph = traced(layers=3)[direction]
    before = text(graph)
    assert expand(graph, limit=None) == count
    assert (text(graph) == before) == (count == 0)
    # A limit that was asked for has no such bound.
    assert expand(graph, limit=2) == 3 - count
