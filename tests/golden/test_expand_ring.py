"""Rings of few ranks become shifts, steps and waits; the same ones on every rank."""
# ruff: noqa: E501  graphs as text have long lines

import copy
import itertools
import operator
import re
from unittest import mock

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from expecttest import assert_expected_inline
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

import cpcompile as cp
from cpcompile import backend, config
from cpcompile.kernels import choice
from cpcompile.ops.ring_exchange import NOTHING_TO_HIDE_IT
from cpcompile.passes.expand_ring import RINGS, expand_ring
from tests.golden.capture import fake_group

SHIFT = torch.ops.cp.ring_shift.default


def traced(*place, seq=16, causal=True, kv_heads=2, layers=1, strategy="ring"):
    """The graphs of forward and backward that AOTAutograd hands to Inductor.

    `place` is the rank and the number of ranks, (1, 2) unless given.
    """
    rank, ranks = place or (1, 2)
    graphs = {}

    def keep(name):
        def compiler(gm, _):
            graphs[name] = gm.graph
            return make_boxed_func(gm.forward)

        return compiler

    def attend(q, k, v):
        for _ in range(layers):
            q = F.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=kv_heads != 2
            )
        return q

    inner = aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"))
    options = {"inner": "aot_eager", "strategy": strategy}
    with (
        fake_group(rank, ranks),
        mock.patch.object(backend, "lookup_backend", lambda _: inner),
    ):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
        qkv = (
            cp.shard(torch.randn(1, heads, seq, 4), mesh, 2).requires_grad_()
            for heads in (2, kv_heads, kv_heads)
        )
        step = torch.compile(attend, backend="cp", fullgraph=True, options=options)
        step(*qkv).sum().backward()
    return graphs["forward"], graphs["backward"]


def expand(graph, *place, limit=8, kernel="auto"):
    """Run the pass on a rank; returns its count."""
    with fake_group(*(place or (1, 2))):
        count = expand_ring(graph, limit, lambda node: kernel)
    graph.lint()
    return count


def text(graph):
    """One call a line; results of tuples are name[i]."""
    lines = [
        f"{node.name} = {str(node.target).removesuffix('.default')}"
        f"({', '.join(map(argument, node.args))})"
        for node in graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    ]
    lines.append(f"return {argument(graph.output_node().args[0])}")
    return re.sub(r" of the \w+ward of ring attention,", ",", "\n".join(lines))


def argument(value):
    if isinstance(value, fx.Node):
        is_part = value.target is operator.getitem
        return f"{value.args[0].name}[{value.args[1]}]" if is_part else value.name
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(argument, value))}]"
    return repr(value)


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
        assert expand_ring(graph, 8, kernels.__getitem__) == 2
    steps = graph.find_nodes(
        op="call_function", target=torch.ops.cp.attention_step.default
    )
    assert [next(a for a in x.args if isinstance(a, str)) for x in steps] == [
        *["aten_math"] * 2,
        *["aten_flash"] * 2,
    ]
    assert config.step_kernel == "auto"


def topology(graph):
    """The calls with their tensors; integers and the texts of `where` are left out."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    calls = []
    for node in graph.nodes:
        leaves, _ = pytree.tree_flatten((node.args, node.kwargs))
        is_step = "attention_step" in str(node.target)
        calls.append(
            (
                str(node.target),
                [numbers[x] for x in leaves if isinstance(x, fx.Node)],
                [x for x in leaves if isinstance(x, bool | float)],
                [x for x in leaves if isinstance(x, str)] if is_step else [],
            )
        )
    return calls


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seq", [16, 14, 5])
def test_every_rank_has_the_same_calls(monkeypatch, causal, seq):
    """14 tokens: 4, 4, 4, 2. 5 tokens: 2, 2, 1, 0."""
    monkeypatch.setattr(choice, "_has_triton", lambda: True)
    graphs = [traced(rank, 4, seq=seq, causal=causal) for rank in range(4)]
    for direction, kernel in itertools.product((0, 1), ("aten_flash", "triton")):
        found, wheres = [], []
        for rank in range(4):
            graph = copy.deepcopy(graphs[rank][direction])
            assert expand(graph, rank, 4, limit=4, kernel=kernel) == 1
            found.append(topology(graph))
            shifts = graph.find_nodes(op="call_function", target=SHIFT)
            wheres.append([x.args[-1].removesuffix(NOTHING_TO_HIDE_IT) for x in shifts])
        assert all(x == found[0] for x in found)
        assert all(x == wheres[0] for x in wheres)
        assert len(wheres[0]) == (3 if direction == 0 else 3 + 4)


@pytest.mark.parametrize("kernel", ["aten_flash", "triton"])
@pytest.mark.parametrize("direction", [0, 1], ids=["forward", "backward"])
def test_metadata(monkeypatch, kernel, direction):
    """Every new node has a value, and the user's line and module of the ring."""
    monkeypatch.setattr(choice, "_has_triton", lambda: True)
    graph = traced(kv_heads=1)[direction]
    (ring,) = (node for node in graph.nodes if node.target in RINGS)
    old, metadata = set(graph.nodes), dict(ring.meta)
    results = [node.meta["val"] for node in graph.output_node().args[0]]
    expand(graph, kernel=kernel)
    new = [node for node in graph.nodes if node not in old]
    assert len(new) > 5
    for node in new:
        for value in pytree.tree_leaves(node.meta["val"]):
            assert isinstance(value, FakeTensor)
            assert value.fake_mode is results[0].fake_mode
        for name in ("stack_trace", "seq_nr", "nn_module_stack"):
            assert node.meta.get(name) == metadata.get(name)
        assert node.meta["original_aten"] is not None
    assert "scaled_dot_product_attention" in metadata["stack_trace"]
    for node, value in zip(graph.output_node().args[0], results, strict=True):
        got = node.meta["val"]
        assert (got.shape, got.dtype) == (value.shape, value.dtype)
        assert got.stride() == value.stride()
