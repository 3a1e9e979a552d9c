"""The table of dimensions says what a call does, and what DTensor's proof says."""

import operator

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Partial

from cpcompile.passes.flow.dim_maps import SUM, regrouped
from cpcompile.passes.flow.dim_rules import dim_map
from cpcompile.passes.flow.flow import UNKNOWN, Flows
from cpcompile.passes.flow.shaped_calls import shaped_call
from cpcompile.passes.graph.nodes import value_of
from cpcompile.passes.graph.sequence_tokens import TokenAxis, TokenDim
from cpcompile.passes.model.tokens.dim_flows import dim_flows, part_written
from cpcompile.torch_patches import fixed_rules
from tests.unit.tiling.test_token_wise import CALLS, outer_splits, traced

fixed_rules.install()

X = (2, 6, 8)

# As Dynamo has them: the call, the shapes of its operands, and how many dimensions of
# the result the table knows.
OF_MODELS = {
    "linear": (lambda x, w, b: F.linear(x, w, b), [X, (4, 8), (4,)], 3),
    "linear without a bias": (lambda x, w: F.linear(x, w), [X, (4, 8)], 3),
    "matmul": (lambda x, y: torch.matmul(x, y), [(2, 1, 6, 8), (3, 8, 4)], 4),
    "operator": (lambda x, y: x @ y, [X, (8, 4)], 3),
    "einsum": (lambda x, y: torch.einsum("bsd,td->bst", x, y), [X, (6, 8)], 3),
    "add": (lambda x, y: x + y, [X, (6, 1)], 3),
    "written in Python": (lambda x: F.silu(x), [X], 3),
    "logsigmoid": (lambda x: F.logsigmoid(x), [X], 3),
    "method": (lambda x: x.softmax(1), [X], 2),
    "heads": (lambda x: x.view(2, 6, 4, 2), [X], 4),
    "heads back": (lambda x: x.flatten(1), [X], 1),
    "swapped": (lambda x: x.swapaxes(-1, 0), [X], 3),
    "mT": (lambda x: x.mT, [X], 3),
    "squeeze": (lambda x: x.squeeze(1), [(2, 1, 6)], 2),
    "expand": (lambda x: x.expand(2, 6, 8), [(6, 1)], 1),
    "to": (lambda x: x.double(), [X], 3),
    "embedding": (lambda w: F.embedding(torch.arange(6), w), [(7, 8)], 2),
    "mean": (lambda x: x.mean(-1, keepdim=True), [X], 2),
    "largest": (lambda x: x.max(1), [X], 2),
    "larger": (lambda x, y: torch.max(x, y), [X, (8,)], 3),
    "unbind": (lambda x: x.unbind(1), [X], 2),
    "row": (lambda x: x[:, 1], [X], 2),
    "new dimension": (lambda x: x[:, None], [X], 3),
    "slice": (lambda x: x[:, 1:4], [X], 2),
    "cat": (lambda x, y: torch.cat([x, y], 1), [X, X], 2),
    "pad": (lambda x: F.pad(x, (0, 0, 1, 0)), [X], 2),
    "index_select": (lambda x, w: x.index_select(1, w.int()), [X, (3,)], 3),
    "view as numbers": (lambda x: torch.view_as_real(x.cfloat()), [X], 3),
}


def node_of(name: str) -> fx.Node:
    """The call as a node, of Dynamo or of aten."""
    if name in OF_MODELS:
        function, shapes, _ = OF_MODELS[name]
        return last(graph_of(function, *shapes))
    return traced(name)[0]


def tensors(node):
    value = value_of(node)
    return value if isinstance(value, tuple) else (value,)


def proof(flows, node, axes, n):
    """What DTensor says of a call whose operands are cut so; None if nothing."""
    call, leaves = shaped_call(node)
    roles = [_role(axes.get(x)) if isinstance(x, fx.Node) else None for x in leaves]
    return flows.of(call, roles, n), leaves


def _role(axis):
    return None if axis is None else TokenDim(axis.dim, axis.outer)


# No dimension of the result is proved: it has none, all of them are one, or random
# numbers are drawn, or DTensor has no rule (logsigmoid).
UNPROVED = {"sum of all", "view of all", "drawn", "new_zeros", "logsigmoid"}


@pytest.fixture(scope="module")
def flows():
    return Flows(FakeTensorMode(), "cpu")


@pytest.mark.parametrize("name", [*OF_MODELS, *CALLS])
def test_the_table_and_the_proof_do_not_contradict(name, flows):
    node = node_of(name)
    table = dim_map(node)
    if table is None:
        assert name == "tril"
        return
    proved = 0
    for dim in range(tensors(node)[0].dim()):
        for axis, n in outer_splits(tensors(node)[0], dim):
            axes = table.before(node, axis, n)
            if not axes:
                continue
            flow, _ = proof(flows, node, axes, n)
            if flow is None or UNKNOWN in [x.role for x in flow.tensors]:
                continue
            assert not flow.cut and not flow.ends_sums, (axis, axes, flow)
            assert {x.role for x in flow.tensors} == {_role(axis)}, (axes, flow)
            proved += 1
    assert bool(proved) == (name not in UNPROVED)


@pytest.mark.parametrize("name", [*OF_MODELS, *CALLS])
def test_from_one_operand(name, flows):
    node = node_of(name)
    table = dim_map(node)
    for operand in node.all_input_nodes if table is not None else ():
        value = value_of(operand)
        if not isinstance(value, torch.Tensor):
            continue
        for dim in range(value.dim()):
            for axis, n in outer_splits(value, dim):
                found = table.after(node, {operand: axis}, n)
                flow, leaves = proof(flows, node, {operand: axis}, n)
                if found is None or flow is None:
                    continue
                if UNKNOWN in [x.role for x in flow.tensors]:
                    continue
                result, axes = found
                wanted = Partial() if result is SUM else _role(result)
                assert {x.role for x in flow.tensors} == {wanted}, (axis, found, flow)
                cut = {leaves[i]: at for i, at in flow.cut.items()}
                others = {x: _role(at) for x, at in axes.items() if x is not operand}
                assert flow.cuts_inside or cut == others


@pytest.mark.parametrize("name", OF_MODELS)
def test_calls_of_models_are_known(name):
    node = node_of(name)
    table = dim_map(node)
    (value, *_) = tensors(node)
    dims = {
        dim
        for dim in range(value.dim())
        for axis, n in outer_splits(value, dim)
        if table.before(node, axis, n)
    }
    assert len(dims) == OF_MODELS[name][2]


def test_operands_that_meet():
    node = last(graph_of(lambda x: x @ x, (6, 6)))
    table = dim_map(node)
    (operand,) = node.all_input_nodes
    for dim in (0, 1):
        assert table.before(node, TokenAxis(dim), 6) is None
        assert table.after(node, {operand: TokenAxis(dim)}, 6) is None

    def join(x, y):
        return torch.cat([torch.empty(0), x, y], -2)

    found = kept(join, OPERAND, (2, 4, 8))
    assert found == [(name, d, d) for name in "xy" for d in range(3)]


@pytest.mark.parametrize(
    ("shape", "new"), [((2, 0, 6, 8), (2, 0, 48)), ((0, 6, 8), (0, 48)), ((6, 0), (0,))]
)
def test_a_view_of_nothing_says_nothing(shape, new):
    """As where a sequence is too short for a single block of compressed keys."""
    for dim in range(len(shape)):
        assert regrouped(TokenAxis(dim), shape, new, max(shape[dim], 1)) is None


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


OPERAND = (2, 9, 8)


def moved(fn):
    """The same of every flow, for calls that move tokens."""
    flows = dim_flows(last(graph_of(fn, OPERAND)))
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
    assert kept(fn, OPERAND) == (
        None if pairs is None else [("x", *pair) for pair in pairs]
    )


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
    base.meta["example_value"] = torch.empty(OPERAND)
    if part is not None:
        value = graph.placeholder("y")
        value.meta["example_value"] = torch.empty(part)
    node = graph.call_function(operator.setitem, (base, index, value))
    assert [(p.dim, p.out) for p in part_written(node)] == expected
    assert all(p.source is value for p in part_written(node))
