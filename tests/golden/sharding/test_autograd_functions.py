"""Autograd functions: writes become functional, chunks of tokens are shared out."""

import torch

from cpcompile.passes.model.functions.function_bodies import (
    function_bodies,
    is_autograd_function,
)
from tests.golden.capture import body, capture, sharded, warnings, without_lines
from tests.golden.golden_text import assert_golden, bare_calls, lines_with
from tests.golden.operands import attend
from tests.support.fused_losses import LOSSES, Model, Writing, batch


def captured(mesh, kind):
    return capture(Model(kind), *batch(16), mesh=mesh)


def lines(found):
    wanted = lines_with(
        bare_calls(found.text), "_function", "cp_place(", "= cp_replicated["
    )
    return "\n".join(x for x in wanted.splitlines() if "get_attr" not in x)


def test_a_fused_loss_runs_on_the_tokens_of_each_rank(mesh, caplog):
    """Every rank counts all labels, and takes its own to compute with."""
    found = captured(mesh, LOSSES["scatter_add_"])
    assert_golden(
        lines(found),
        """\
cp_place = cp_place(arg, (_S(0, 2),))
autograd_function_apply = cp_row_parallel_function(cp_replicate_4, y_1, cp_replicate_3,
    getattr_1, getattr_2, getattr_3, getattr_4, cp_place)
cp_gather = cp_gather(autograd_function_apply[0])""",
    )
    assert warnings(caplog) == []


def test_a_mean_of_every_chunk_is_gathered(mesh, caplog):
    """Which tokens count together depends on the chunks."""
    found = captured(mesh, LOSSES["mean of chunks"])
    assert_golden(
        lines(found),
        """\
cp_replicated = cp_replicated(autograd_function_apply, autograd_function_apply_forward,
    autograd_function_apply_backward, arg, y_1, cp_replicate_3, getattr_1, getattr_2,
    non_differentiable_idx=[], saved_for_backward_idx=[0, 1])""",
    )
    (warning,) = warnings(caplog)
    assert_golden(
        without_lines(warning),
        """\
autograd_function_apply at <top level> (LINE) runs on gathered tensors, because DTensor
    cannot shard it here (it takes its tokens in chunks, and add of <top level> (LINE)
    is not computed alike for all tokens); the result is correct, only slower""",
    )


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
