"""A call that counts as token-wise gives, for some tokens, that part of its result."""

import itertools

import pytest
import torch
import torch.fx as fx
from torch.fx.experimental.proxy_tensor import make_fx

from cpcompile.passes.flow.dim_maps import SUM
from cpcompile.passes.flow.linear_calls import is_linear
from cpcompile.passes.graph.sequence_tokens import TokenAxis
from cpcompile.passes.joint.tiling.tile_program import Leaving, body_of
from cpcompile.passes.joint.tiling.tile_regions import (
    RegionPart,
    TileMaps,
    TileRegion,
)

aten = torch.ops.aten


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64)


def index(high, *shape):
    return torch.randint(0, high, shape)


A, B = numbers(2, 6, 5), numbers(2, 6, 5)

# operator, its arguments, how many dimensions of the result may be those of tokens,
# where they differ: seen from the result, and from operands with two tokens or more
CALLS = {
    "mul": (aten.mul.Tensor, (A, B), 3),
    "mul of a row": (aten.mul.Tensor, (A, numbers(5)), 3),
    "mul of a column": (aten.mul.Tensor, (A, numbers(6, 1)), 3),
    "where": (aten.where.self, (A > 0, B, numbers(1)), 3),
    "to": (aten._to_copy.default, (A,), 3),
    "expand": (aten.expand.default, (numbers(6, 1), [2, 6, 5]), (3, 1)),
    "silu_backward": (aten.silu_backward.default, (A, B), 3),
    "view that joins": (aten.view.default, (A, [12, 5]), 2),
    "view that splits": (aten.view.default, (numbers(6, 4), [6, 2, 2]), 3),
    "view of all": (aten.view.default, (A, [60]), (0, 1)),
    "unsqueeze": (aten.unsqueeze.default, (A, 1), 3),
    "squeeze": (aten.squeeze.dim, (numbers(2, 1, 6), 1), 2),
    "permute": (aten.permute.default, (A, [2, 0, 1]), 3),
    "t": (aten.t.default, (numbers(6, 5),), 2),
    "transpose": (aten.transpose.int, (A, 0, -1), 3),
    "select": (aten.select.int, (A, 1, 2), 2),
    "sum": (aten.sum.dim_IntList, (A, [1]), 2),
    "sum, kept": (aten.sum.dim_IntList, (A, [-1], True), 2),
    "sum of all": (aten.sum.default, (A,), 0),
    "mean": (aten.mean.dim, (A, [0, 2]), 1),
    "amax": (aten.amax.default, (A, [1], True), 2),
    "mm": (aten.mm.default, (numbers(6, 5), numbers(5, 4)), 2),
    "addmm": (aten.addmm.default, (numbers(4), numbers(6, 5), numbers(5, 4)), 2),
    "addmm of a matrix": (
        aten.addmm.default,
        (numbers(6, 4), numbers(6, 5), numbers(5, 4)),
        2,
    ),
    "bmm": (aten.bmm.default, (A, numbers(2, 5, 4)), 3),
    "softmax": (aten._softmax.default, (A, -1, False), 2),
    "log_softmax": (aten._log_softmax.default, (A, 1, False), 2),
    "its backward": (
        aten._log_softmax_backward_data.default,
        (A, B.log_softmax(-1), -1, torch.float64),
        2,
    ),
    "gather": (aten.gather.default, (A, 2, index(5, 2, 6, 3)), 3),
    "gather of fewer": (aten.gather.default, (A, 2, index(5, 2, 4, 3)), 2),
    "scatter": (aten.scatter.value, (A, 2, index(5, 2, 6, 1), 3.0), 2),
    "scatter_add": (
        aten.scatter_add.default,
        (A, 2, index(5, 2, 6, 3), numbers(2, 6, 3)),
        2,
    ),
    "scatter_reduce": (
        aten.scatter_reduce.two,
        (A, 2, index(5, 2, 6, 3), numbers(2, 6, 3), "amax"),
        2,
    ),
    "new_zeros": (aten.new_zeros.default, (A, [2, 6, 3]), (3, 0)),
    "slice": (aten.slice.Tensor, (A, 2, 1, 4), 2),
    "slice_scatter": (aten.slice_scatter.default, (A, numbers(2, 6, 2), 2, 1, 3), 2),
    "cat": (aten.cat.default, ([A, numbers(2, 6, 3)], 2), 2),
    "cat with an empty one": (aten.cat.default, ([numbers(0), A], 2), 2),
    "index_select": (aten.index_select.default, (A, 1, index(6, 4)), 3),
    "embedding": (aten.embedding.default, (numbers(7, 4), index(7, 2, 6)), 3),
    "index": (aten.index.Tensor, (A, [index(2, 6), index(6, 6)]), 2),
    "baddbmm": (aten.baddbmm.default, (numbers(6, 1), A, numbers(2, 5, 4)), 3),
    "cumsum": (aten.cumsum.default, (A, 1), 2),
    "flip": (aten.flip.default, (A, [1]), 2),
    "roll": (aten.roll.default, (A, [1], [-1]), 2),
    "pad": (aten.constant_pad_nd.default, (A, [0, 0, 1, 0]), 2),
    "tril": (aten.tril.default, (A,), 0),  # without a rule
    "drawn": (aten.bernoulli.p, (A, 0.5), 0),
}
NAMED = pytest.mark.parametrize("name", CALLS)


def traced(name):
    """The node of the call, and the values of its operands."""
    op, args, _ = CALLS[name]
    tensors = [x for x in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(x)]

    def call(*given):
        left = iter(given)
        return op(
            *torch.utils._pytree.tree_map_only(torch.Tensor, lambda _: next(left), args)
        )

    graph = make_fx(call, tracing_mode="fake")(*tensors).graph
    (node,) = [x for x in graph.nodes if x.target is op]
    return node, dict(zip(graph.find_nodes(op="placeholder"), tensors, strict=True))


def piece(x, axis, n, start, stop):
    """Some tokens of a tensor."""
    if axis is None:
        return x
    shape = list(x.shape)
    shape[axis.dim : axis.dim + 1] = [axis.outer, n, axis.inner]
    part = x.reshape(shape).narrow(axis.dim + 1, start, stop - start)
    return part.flatten(axis.dim, axis.dim + 2)


def check_tiles(node, values, axis, operands, n, whole):
    region = TileRegion(n, {node: axis}, dict(operands))
    part = RegionPart(region, (node,), (node,))
    total = torch.zeros_like(whole)
    for start, stop in itertools.pairwise([0, n // 2, n]):
        leaving = Leaving.of(part)
        body = body_of(part, leaving, stop - start)
        given = [piece(values[x], operands.get(x), n, start, stop) for x in part.inputs]
        if leaving.products:  # added up outside
            assert body(*given, total.flatten()[0]) == ()
            total = total + node.target(*given)
            continue
        if axis is SUM:
            (total,) = body(*given, total)
            continue
        (got,) = body(*given)
        torch.testing.assert_close(got, piece(whole, axis, n, start, stop))
    if axis is SUM:
        torch.testing.assert_close(total, whole)


def outer_splits(x, dim):
    """Ways in which one dimension holds tokens."""
    for outer, inner in itertools.product([1, 2], [1, 2]):
        size = x.shape[dim]
        if size % (outer * inner) == 0 and size // (outer * inner) > 1:
            yield TokenAxis(dim, outer, inner), size // (outer * inner)


@NAMED
def test_from_results_to_operands_and_back(name):
    node, values = traced(name)
    op, _, possible = CALLS[name]
    torch.manual_seed(0)
    whole = op(*fx.node.map_arg(node.args, values.__getitem__))
    found = set()
    for dim in range(whole.dim()):
        for axis, n in outer_splits(whole, dim):
            operands = TileMaps().before(node, axis, n)
            if operands is not None:
                check_tiles(node, values, axis, operands, n, whole)
                found.add(dim)
    assert len(found) == (possible[0] if isinstance(possible, tuple) else possible)
    node, values = traced(name)
    op, _, possible = CALLS[name]
    torch.manual_seed(0)
    whole = op(*fx.node.map_arg(node.args, values.__getitem__))
    found = set()
    for operand, x in values.items():
        for dim in range(x.dim()):
            for axis, n in outer_splits(x, dim):
                result = TileMaps().after(node, {operand: axis}, n)
                if result is not None:
                    check_tiles(node, values, result[0], result[1], n, whole)
                    found.add(result[0])
    dims = {axis.dim for axis in found if isinstance(axis, TokenAxis)}
    assert len(dims) == (possible[1] if isinstance(possible, tuple) else possible)
    sums = ("sum", "sum, kept", "sum of all", "mm", "bmm")
    assert (SUM in found) == (name in sums)


@NAMED
def test_what_counts_as_linear_is(name):
    node, values = traced(name)
    operands = list(values)
    chosen = [[x] for x in operands] + [operands] * (len(operands) > 1)
    call = CALLS[name][0]
    for variable in chosen:
        if not is_linear(node, set(variable)):
            continue
        one, two = ({x: numbers(*values[x].shape) for x in variable} for _ in range(2))
        both = {x: 2 * one[x] - 3 * two[x] for x in variable}
        results = [
            call(*fx.node.map_arg(node.args, (values | given).__getitem__))
            for given in (one, two, both)
        ]
        torch.testing.assert_close(results[2], 2 * results[0] - 3 * results[1])


@pytest.mark.parametrize("name", ["silu_backward", "its backward", "mm", "sum", "cat"])
def test_linear_calls_are_known(name):
    node, values = traced(name)
    variable = set(values) if name == "cat" else {node.all_input_nodes[0]}
    assert is_linear(node, variable)


def test_entries_added_to_zeros_are_linear():
    graph = fx.Graph()
    grad, index, base = map(graph.placeholder, ("grad", "index", "base"))
    zeros = graph.call_function(aten.new_zeros.default, (grad, [2, 5]))
    added = graph.call_function(aten.scatter_add.default, (zeros, 1, index, grad))
    other = graph.call_function(aten.scatter_add.default, (base, 1, index, grad))
    assert is_linear(zeros, {grad}) and is_linear(added, {grad})
    assert is_linear(other, {grad, base}) and not is_linear(other, {grad})
    assert not is_linear(added, {grad, index})


@pytest.mark.parametrize(
    "name", ["mul", "where", "softmax", "addmm", "scatter", "amax"]
)
def test_calls_that_are_not_linear(name):
    node, values = traced(name)
    assert not is_linear(node, set(values))
