"""Graphs as text: names of arguments, defaults, indices, and what is left out."""

import operator

import torch
import torch.fx as fx
import torch.nn as nn
from expecttest import assert_expected_inline

import cpcompile.ops  # noqa: F401  (it registers torch.ops.cp)
from cpcompile.geometry.visibility import Visible
from cpcompile.ops.step.step_arguments import StepChunk
from cpcompile.passes.graph.nodes import module_path
from cpcompile.passes.graph.readable import readable

aten, cp = torch.ops.aten, torch.ops.cp


def text_of(target, args, kwargs=None):
    """How one call is printed; "x" stands for a tensor."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(target, tuple(x if a == "x" else a for a in args), kwargs)
    return readable(graph).splitlines()[1].split(" = ")[1]


def test_arguments_of_operators():
    texts = [
        text_of(aten.add.Tensor, ("x", 2), {"alpha": 1}),
        text_of(aten.sum.dim_IntList, ("x", [1], True)),
        text_of(aten.slice.Tensor, ("x", 0, 0, 8)),
        text_of(aten.slice.Tensor, ("x", 1, None, 8), {"step": 2}),
        text_of(aten.full.default, ([2], 0.5), {"dtype": torch.int64}),
        text_of(aten.linear.default, ("x", "x", None)),
        text_of(aten.layer_norm.default, ("x", [8], None, "x", 1e-5)),
        text_of(aten.view.default, ("x", [])),
        text_of(aten.sum.dim_IntList, ("x", [])),
        text_of(cp.relayout.default, ("x", 1, 13, "zigzag", "fold", "7")),
    ]
    assert_expected_inline(
        "\n".join(texts),
        """\
aten.add.Tensor(x, 2)
aten.sum.dim_IntList(x, dim=[1], keepdim=True)
aten.slice.Tensor(x, start=0, end=8)
aten.slice.Tensor(x, dim=1, end=8, step=2)
aten.full(size=[2], fill_value=0.5, dtype=torch.int64)
aten.linear(x, x)
aten.layer_norm(x, normalized_shape=[8], bias=x)
aten.view(x)
aten.sum.dim_IntList(x, dim=[])
cp.relayout(x, dim=1, length=13, source='zigzag', target='fold', group='7')""",
    )


def test_what_has_no_default_is_left_out_if_it_is_nothing():
    told = StepChunk.plain(0.5, Visible(keys=(0, 4))).arguments()
    step = (*"xxx", None, None, *told, True, "aten_math", "x")
    text = text_of(cp.attention_step.default, step)
    start = "cp.attention_step(x, x, x, keys=[0, 4], spec='scale=0.5', final="
    assert text.startswith(start)
    assert text.endswith("kernel='aten_math', after=x)")


def test_indices():
    everything = slice(None)
    indices = [
        (everything, everything, None),
        (..., slice(None, 4)),
        slice(1, 9, 2),
        (3,),
        -1,
        [0, 2],
        "key",
        (),
    ]
    texts = [text_of(operator.getitem, ("x", index)) for index in indices]
    assert_expected_inline(
        "\n".join(texts),
        """\
x[:, :, None]
x[..., :4]
x[1:9:2]
x[3]
x[-1]
x[[0, 2]]
x['key']
x[()]""",
    )
    written = text_of(operator.setitem, ("x", (everything, 0), 1))
    assert written == "setitem(x, (:, 0), 1)"


def test_functions():
    pad = text_of(torch.nn.functional.pad, ("x", (0, 1), "constant", 0.25))
    assert pad == "pad(x, (0, 1), 'constant', 0.25)"
    zeros = text_of(torch.zeros, (2, 3), {"dtype": torch.int64})
    assert zeros == "zeros(2, 3, dtype=torch.int64)"


def test_nodes_that_are_left_out():
    """Their users name what is after them."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    split = graph.call_function(aten.split.Tensor, (x, 4))
    part = graph.call_function(operator.getitem, (split, 1))
    view = graph.call_function(aten.view.default, (part, [2, 2]))
    relu = graph.call_function(aten.relu.default, (view,))
    graph.output((relu, view, split))
    hidden = (operator.getitem, aten.view.default)
    assert_expected_inline(
        readable(graph, lambda node: node.target in hidden),
        """\
x = input
split_tensor = aten.split.Tensor(x, split_size=4)
relu_default = aten.relu(split_tensor[1])
return (relu_default, split_tensor[1], split_tensor)""",
    )
    assert len(readable(graph).splitlines()) == 6


class Getting(nn.Module):
    """A module with a __getattr__ of its own, as those of diffusers have."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2))])

    def __getattr__(self, name):
        return super().__getattr__(name)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_module_with_a_getattr_of_its_own():
    paths = []

    def backend(gm, _):
        calls = gm.graph.find_nodes(op="call_function", target=nn.functional.linear)
        paths.extend(map(module_path, calls))
        return gm

    torch._dynamo.reset()
    torch.compile(Getting(), backend=backend)(torch.ones(1, 2))
    assert paths == ["blocks.0.0"]
