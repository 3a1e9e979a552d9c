"""Graphs in the local view: nothing is moved between the layout and the results."""

import pytest
import torch
import torch.nn as nn

import cpcompile as cp
from cpcompile.frontend.local_view import local_cp
from cpcompile.geometry.layout import Layout
from cpcompile.options import GradSync
from cpcompile.passes.graph.context import InputKind
from tests.golden.capture import capture
from tests.golden.golden_text import assert_golden, bare_calls, lines_with
from tests.golden.laid_out import attend

LOCAL = {"backend": local_cp}


def block(x):
    """Token-wise calls around attention, x [2, 32, 8]."""
    return x + attend(x * 2)


def entering(mesh, layout):
    return cp.shard(torch.randn(2, 32, 8), mesh, 1, layout=layout)


def test_results_stay_in_the_layout_of_the_batch(mesh):
    x = entering(mesh, "zigzag")
    captured = capture(block, x, layout="auto", **LOCAL)
    assert_golden(
        lines_with(bare_calls(captured.text), "cp_", "ring"),
        """\
cp_from_local = cp_from_local(l_x_, (S(1),), (2, 32, 8), (256, 8, 1))
mul = mul(cp_from_local, 2)
ring_attention_default = cp.ring_attention(q, q, q, sizes=[32, 32],
    spec='causal zigzag scale=0.5', group=GROUP)
transpose_1 = .transpose(ring_attention_default[0], 1, 2)
add = add(cp_from_local, flatten)
cp_to_local = cp_to_local(add, (S(1),))
return (cp_to_local,)""",
    )
    (leaving,) = captured.ctx.findings.outputs
    assert leaving.layout is Layout.ZIGZAG


def test_in_the_global_view_results_are_in_order(mesh):
    """The twin."""
    x = entering(mesh, "zigzag")
    captured = capture(block, x, layout="auto")
    assert captured.text.count("cp.relayout") == 1
    (leaving,) = captured.ctx.findings.outputs
    assert leaving.layout is Layout.CONTIGUOUS


def test_a_contiguous_batch_stays_as_it_is(mesh):
    captured = capture(block, entering(mesh, "contiguous"), **LOCAL)
    assert "cp.relayout" not in captured.text
    assert captured.ctx.findings.outputs[0].layout is Layout.CONTIGUOUS


class Scaled(nn.Module):
    """A parameter, and an activation that is the same on every rank."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x, bias):
        return attend(x * self.scale + bias)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (LOCAL, GradSync.NONE),
        ({}, GradSync.REDUCE),
        ({"grad_sync": "average"}, GradSync.AVERAGE),
    ],
)
def test_which_gradients_leave(mesh, options, expected):
    x, bias = entering(mesh, "contiguous"), torch.ones(8, requires_grad=True) * 1
    captured = capture(Scaled(), x, bias, **options)
    gradients = {x.kind: x.gradient for x in captured.ctx.inputs.values()}
    assert gradients[InputKind.PARAMETER] is expected
    local = options == LOCAL
    assert gradients[InputKind.ACTIVATION] is (
        GradSync.NONE if local else GradSync.REDUCE
    )
    calls = captured.text.count("= cp_unreduced(")
    assert calls == 2 * local + (expected is GradSync.AVERAGE)
    assert ("cp_unreduced(l_self_parameters_scale_, 8)" in captured.text) == (
        expected is GradSync.AVERAGE
    )
