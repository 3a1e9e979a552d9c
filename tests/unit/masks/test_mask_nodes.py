"""The nodes that say what a mask says go through AOTAutograd, with gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.fx as fx
from torch._dynamo.backends.registry import lookup_backend

import tests.unit.masks.mask_builders as b
from cpcompile.passes.graph.context import Context
from cpcompile.passes.model.attention.find_attention import find_attention
from cpcompile.passes.model.masks.rewrite_masks import rewrite_masks
from tests.support.bounds import assert_equal
from tests.support.position_biases import of_pairs
from tests.unit.masks.mask_cases import attend, operands

S = 21
CASES = [
    (b.window, []),
    (b.packed_chunks, [torch.arange(S).expand(2, -1) % 8]),
    (b.chunks_after_padding, [(torch.arange(S).expand(2, -1) > 3).long()]),
    (b.prefix, [torch.tensor([3, 9])]),
    (b.blocks, [torch.arange(S).expand(2, -1) // 4]),
    (b.alibi, []),
]


@pytest.mark.parametrize(("builder", "data"), CASES, ids=[x[0].__name__ for x in CASES])
def test_nodes_are_compiled(builder, data):
    compared = []

    def backend(gm, inputs):
        ctx = Context(mesh=None, axis=0, inputs={}, profile=None)
        find_attention(gm.graph, ctx)
        rewrite_masks(gm.graph, ctx)
        (output,) = gm.graph.find_nodes(op="output")
        count = len(output.args[0])
        output.args = (
            (*output.args[0], *ctx.findings.masks[ctx.findings.calls[0]].nodes),
        )
        gm.recompile()
        eager = fx.Interpreter(copy.deepcopy(gm)).run
        compiled = lookup_backend("aot_eager")(gm, inputs)

        def run(*args):
            results = compiled(*args)
            for x, y in zip(results, eager(*args), strict=True):
                assert_equal(f"result {len(compared)}", x, y)
                compared.append(x)
            return results[:count]

        return run

    torch._dynamo.reset()
    fn = torch.compile(attend(builder), backend=backend, fullgraph=True, dynamic=False)
    fn(*operands(S), *data)
    assert len(compared) > 1


def test_a_weight_gets_the_gradient_of_the_model():
    """A bias from a look-up is the model's, forward and backward."""
    weight = torch.randn(8, 2, requires_grad=True)
    grads = []

    def backend(gm, inputs):
        ctx = Context(mesh=None, axis=0, inputs={}, profile=None)
        find_attention(gm.graph, ctx)
        (wanted,) = (call.mask for call in ctx.findings.calls)
        rewrite_masks(gm.graph, ctx)
        bias = ctx.findings.masks[ctx.findings.calls[0]].bias
        (output,) = gm.graph.find_nodes(op="output")
        output.args = ((bias, wanted),)
        return fx.Interpreter(gm).run  # code cannot name what its calls hold

    model = attend(b.relative)

    def both_biases(q, k, weight):
        return model(q, k, weight), weight * 1

    torch._dynamo.reset()
    fn = torch.compile(both_biases, backend=backend, fullgraph=True, dynamic=False)
    for x in fn(*operands(S), weight):
        x = of_pairs(x, S, S)
        (grad,) = torch.autograd.grad((x * torch.arange(S)).sum(), weight)
        grads.append(grad)
    assert_equal("grad of weight", *grads)
    assert grads[0].abs().max() > 0
