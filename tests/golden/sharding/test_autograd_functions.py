"""Autograd functions: writes become functional."""

import torch

from cpcompile.passes.model.functions.function_bodies import (
    function_bodies,
    is_autograd_function,
)
from tests.golden.capture import body, sharded
from tests.golden.golden_text import assert_golden
from tests.golden.operands import attend
from tests.support.fused_losses import Writing


def test_a_function_without_writes_stays(mesh):
    """DTensor does what it does with it."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    found = sharded(lambda x: Doubled.apply(attend(x)), mesh)
    assert found["functionalise_writes"].rewrites == 0
    assert "function" not in body(found)


def test_writes_of_a_body(mesh):
    """The graph of the forward, before and after the pass."""
    weight = torch.randn(8, 8, requires_grad=True)

    def call(x):
        return Writing.apply(attend(x).flatten(0, 1), weight, "columns")

    found = sharded(call, mesh)
    assert found["functionalise_writes"].rewrites == 1
    (node,) = [n for n in found.gm.graph.nodes if is_autograd_function(n)]
    text = function_bodies(node).forward.code
    wanted = [x for x in text.splitlines() if "slice" in x]
    assert_golden(
        "\n".join(x.split(";")[0].strip().replace("torch.ops.", "") for x in wanted),
        """\
slice_1 = aten.slice.Tensor(mul, 1, 0, 5)
slice_2 = aten.slice.Tensor(mul, 1, 5, 9223372036854775807)
expand = aten.expand.default(slice_1, [32, 5])
slice_scatter = aten.slice_scatter.default(empty_like, clone, 1, 0, 5)
expand_1 = aten.expand.default(slice_2, [32, 3])
slice_scatter_1 = aten.slice_scatter.default(slice_scatter, clone_1, 1, 5,
    9223372036854775807)
permute_1 = aten.permute.default(slice_scatter_1, [1, 0])
return ((sum_1,), (slice_scatter_1, arg2_1, mm_1))""",
    )
