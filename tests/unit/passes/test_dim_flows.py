"""Where tokens go in slices, cat and split, without running anything."""

import operator

import pytest
import torch
import torch.fx as fx

from cpcompile.passes.flow.dim_rules import dim_map
from cpcompile.passes.model.sharding.dim_flows import dim_flows, part_written


def graph_of(fn, *shapes):
    """The graph of `fn` on tensors of these shapes, with example values."""
    module = fx.symbolic_trace(fn)
    graph = module.graph
    values = {}
    inputs = iter([torch.zeros(shape) for shape in shapes])
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(inputs)
        elif node.op == "get_attr":
            values[node] = getattr(module, node.target)
        elif node.op == "output":
            break
        else:
            args, kwargs = fx.node.map_aggregate(
                (node.args, node.kwargs),
                lambda a: values[a] if isinstance(a, fx.Node) else a,
            )
            call = node.target
            if node.op == "call_method":
                call = getattr(torch.Tensor, call)
            values[node] = call(*args, **kwargs)
        node.meta["example_value"] = values[node]
    return graph


def last(graph):
    *_, node, _ = graph.nodes
    return node


def kept(fn, *shapes):
    """(input, dimension, dimension of the result) of every pair of the table."""
    found = dim_map(last(graph_of(fn, *shapes)))
    return None if found is None else [(x.name, *dims) for x, *dims in found.pairs]


X = (2, 9, 8)


def moved(fn):
    """The same of every flow, for calls that move tokens."""
    flows = dim_flows(last(graph_of(fn, X)))
    return None if flows is None else [(p.source.name, p.dim, p.out) for p in flows]


SLICES = [
    (lambda x: x[:, 1:], [(0, 0), (1, 1), (2, 2)]),
    (lambda x: x[:, 0], [(0, 0), (2, 1)]),
    (lambda x: x[1], [(1, 0), (2, 1)]),
    (lambda x: x[..., 1:], [(0, 0), (1, 1), (2, 2)]),
    (lambda x: x[..., 0], [(0, 0), (1, 1)]),
    (lambda x: x[:, None], [(0, 0), (1, 2), (2, 3)]),
    (lambda x: x[None, 1, ..., None], [(1, 1), (2, 2)]),
    (lambda x: x[:, ::2, 3], [(0, 0), (1, 1)]),
    (lambda x: x.narrow(1, 2, 3), [(0, 0), (1, 1), (2, 2)]),
    (lambda x: x.roll(1, 1), [(0, 0), (1, 1), (2, 2)]),
    (lambda x: torch.nn.functional.pad(x, (0, 0, 1, 0)), [(0, 0), (1, 1), (2, 2)]),
    (lambda x: x[:, [0, 2]], None),
    (lambda x: x[torch.tensor([True, False])], None),
    (lambda x: x[True], None),
]


@pytest.mark.parametrize(("fn", "pairs"), SLICES, ids=range(len(SLICES)))
def test_one_tensor(fn, pairs):
    assert kept(fn, X) == (None if pairs is None else [("x", *pair) for pair in pairs])


def test_cat_has_tokens_of_all_but_empty_tensors():
    def join(x, y):
        return torch.cat([torch.empty(0), x, y], -2)

    found = kept(join, X, (2, 4, 8))
    assert found == [(name, d, d) for name in "xy" for d in range(3)]


@pytest.mark.parametrize(
    ("fn", "moves"),
    [
        (lambda x: x[:, 1:], True),
        (lambda x: x.split([4, 5], 1)[1], True),
        (lambda x: torch.split(x, 3, 1)[1], True),
        (lambda x: x.chunk(2, 1)[0], True),
        (lambda x: torch.tensor_split(x, 2, dim=1)[0], True),
        (lambda x: x.unbind(1)[0], False),
        (torch.relu, False),
        (lambda x: x[:, 0], False),
        (lambda x: x.softmax(1), False),
    ],
)
def test_calls_that_move_tokens_have_flows(fn, moves):
    assert moved(lambda x: fn(x)) == (
        [("x", d, d) for d in range(3)] if moves else None
    )


@pytest.mark.parametrize(
    ("index", "part", "expected"),
    [
        ((slice(None), slice(1, None)), (2, 8, 8), [(0, 0), (1, 1), (2, 2)]),
        ((slice(None), 0), (2, 8), [(0, 0), (1, 2)]),
        ((slice(None), slice(1, None)), (8, 8), [(0, 1), (1, 2)]),
        ((slice(None), slice(1, None)), (1, 8, 8), [(1, 1), (2, 2)]),
        ([0, 1], (2, 9, 8), []),
        (Ellipsis, (), []),
        (0, None, []),  # a number has no tokens
    ],
)
def test_what_is_assigned_to_a_part(index, part, expected):
    graph = fx.Graph()
    base, value = graph.placeholder("x"), 1.0
    base.meta["example_value"] = torch.empty(X)
    if part is not None:
        value = graph.placeholder("y")
        value.meta["example_value"] = torch.empty(part)
    node = graph.call_function(operator.setitem, (base, index, value))
    assert [(p.dim, p.out) for p in part_written(node)] == expected
    assert all(p.source is value for p in part_written(node))
