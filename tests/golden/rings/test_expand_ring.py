"""Rings of few ranks become shifts, steps and waits, in the order that hides them."""

import pytest
import torch

from cpcompile.kernels import choice
from cpcompile.passes.graph.readable import readable
from cpcompile.passes.local import expand_ring as module
from cpcompile.passes.local.expand_ring import Unrolling, expand_ring
from tests.golden.capture import fake_group
from tests.golden.golden_text import assert_golden, lines_without
from tests.golden.ring_graphs import brief, expand, text, traced


def test_forward():
    graph, _ = traced()
    before = brief(graph)
    assert expand(graph) == 1
    assert_golden(
        f"{before}\n  ->\n{brief(graph)}",
        """\
ring_attention_2 = cp.ring_attention(q, k, v, sizes=[16, 16], spec='causal scale=0.5')
return (ring_attention_2[0], q, k, v, ring_attention_2[0], ring_attention_2[1])
  ->
shift = cp.ring_shift([k, v], where='keys and values, step 0')
step = cp.attention_step(q, k, v, upper=[1, 1], final=False, after=shift[0])
wait = cp.ring_wait(shift[0], step[0], where='keys and values, step 0')
wait_1 = cp.ring_wait(shift[1], step[0], where='keys and values, step 0')
step_1 = cp.attention_step(q, wait, wait_1, step[0], step[1], final=True)
return (step_1[0], q, k, v, step_1[0], step_1[1])""",
    )


def test_backward_of_the_templates(monkeypatch):
    """dK and dV travel while dQ is computed."""
    monkeypatch.setattr(choice, "_has_triton", lambda: True)
    _, graph = traced()
    assert expand(graph, kernel="triton") == 1
    assert text(graph).count("kernel='triton'") == 4
    assert_golden(
        lines_without(brief(graph), "aten.slice", "prims.convert"),
        """\
mul = aten.mul.Tensor(grad, out)
sum_1 = aten.sum.dim_IntList(mul, dim=[-1])
shift = cp.ring_shift([k, v], where='keys and values, step 0')
step_backward = cp.attention_step_backward(grad, q, k, v, lse, sum_1, parts='dkdv',
    upper=[1, 1], final=False, after=shift[0])
shift_1 = cp.ring_shift([step_backward[0], step_backward[1]], where='dk and dv, step 0')
step_backward_1 = cp.attention_step_backward(grad, q, k, v, lse, sum_1, parts='dq',
    upper=[1, 1], final=False, after=shift_1[0])
wait = cp.ring_wait(shift[0], step_backward_1[0], where='keys and values, step 0')
wait_1 = cp.ring_wait(shift[1], step_backward_1[0], where='keys and values, step 0')
wait_2 = cp.ring_wait(shift_1[0], step_backward_1[0], where='dk and dv, step 0')
wait_3 = cp.ring_wait(shift_1[1], step_backward_1[0], where='dk and dv, step 0')
step_backward_2 = cp.attention_step_backward(grad, q, wait, wait_1, lse, sum_1,
    [wait_2, wait_3], parts='dkdv', final=False, after=shift_1[0])
shift_2 = cp.ring_shift([step_backward_2[0], step_backward_2[1]],
    where='dk and dv, step 1')
step_backward_3 = cp.attention_step_backward(grad, q, wait, wait_1, lse, sum_1,
    [step_backward_1[0]], parts='dq', final=True, after=shift_2[0])
wait_4 = cp.ring_wait(shift_2[0], step_backward_3[0], where='dk and dv, step 1')
wait_5 = cp.ring_wait(shift_2[1], step_backward_3[0], where='dk and dv, step 1')
return (step_backward_3[0], convert_element_type, convert_element_type_1)""",
    )


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize(
    ("strategy", "limit"), [("ring", 3), ("ring", 0), ("all_gather", 8)]
)
def test_larger_rings_and_gathered_attention_stay(direction, strategy, limit):
    graph = traced(1, 4, strategy=strategy)[direction]
    before = readable(graph)
    assert f"cp.{strategy}_attention" in before
    assert expand(graph, 1, 4, limit=limit) == 0
    assert readable(graph) == before


def test_a_ring_of_one_rank_is_a_step():
    forward, backward = traced(0, 1)
    assert expand(forward, 0, 1) == expand(backward, 0, 1) == 1
    for graph in (forward, backward):
        names = [str(node.target) for node in graph.nodes]
        assert not any("ring" in name for name in names)
        assert sum("cp.attention_step" in name for name in names) == 1


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
    assert [[a for a in x.args if isinstance(a, str)][1] for x in steps] == [
        *["aten_math"] * 2,
        *["aten_flash"] * 2,
    ]


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize(("steps", "count"), [(6, 3), (5, 0), (0, 0)])
def test_by_itself_it_unrolls_all_of_them_or_none(monkeypatch, direction, steps, count):
    """Three rings of two ranks are six steps."""
    monkeypatch.setattr(module, "AUTO_STEPS", steps)
    graph = traced(layers=3)[direction]
    before = readable(graph)
    assert expand(graph, limit=None) == count
    assert (readable(graph) == before) == (count == 0)
    # A limit that was asked for has no such bound.
    assert expand(graph, limit=2) == 3 - count
