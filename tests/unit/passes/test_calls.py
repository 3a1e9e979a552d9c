"""One spelling for all words of an operation, and the arguments that it has."""

import pytest
import torch
import torch.nn.functional as F

from cpcompile.passes.graph.calls import canonical_call, set_argument
from cpcompile.passes.graph.effects import (
    enables_gradients,
    is_in_place,
    view_of,
    written_by,
)
from tests.support.dynamo_graphs import dynamo_graph

aten = torch.ops.aten


def last_call(fn, *inputs):
    """The last call in the graph that Dynamo makes of a function, items aside."""
    gm = dynamo_graph(fn, *inputs)
    calls = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    several = [n for n in calls if isinstance(n.meta.get("example_value"), tuple)]
    return [n for n in calls if n.args[:1] != tuple(several[:1]) or not several][-1]


def read(fn, *inputs):
    """Name and arguments of the last call, nodes by their names."""
    call = canonical_call(last_call(fn, *(inputs or (torch.ones(4, 6),))))
    arguments = torch.fx.map_arg(call.arguments, lambda n: n.name.strip("l_"))
    return call.name, dict(arguments)


TRANSPOSED = ("transpose", {"input": "x", "dim0": 0, "dim1": 1})
VIEWED = ("view", {"input": "x", "size": [2, 12]})
JOINED = ("cat", {"tensors": ["x", "x"], "dim": 1})
MEAN = ("mean", {"input": "x", "dim": 0, "keepdim": True, "dtype": None})
CONVERTED = ("to", {"input": "x", "dtype": torch.float64})

SPELLINGS = {
    "transpose": (lambda x: x.transpose(0, 1), TRANSPOSED),
    "torch.transpose": (lambda x: torch.transpose(input=x, dim0=0, dim1=1), TRANSPOSED),
    "swapaxes": (lambda x: x.swapaxes(axis0=0, axis1=1), TRANSPOSED),
    "swapdims": (lambda x: torch.swapdims(x, 0, 1), TRANSPOSED),
    "aten.transpose": (lambda x: aten.transpose.int(x, 0, 1), TRANSPOSED),
    "packet": (lambda x: aten.transpose(x, 0, 1), TRANSPOSED),
    "view": (lambda x: x.view(2, 12), VIEWED),
    "view of a list": (lambda x: x.view([2, 12]), VIEWED),
    "view of a size": (lambda x: x.view(size=[2, 12]), VIEWED),
    "cat": (lambda x: torch.cat([x, x], 1), JOINED),
    "concat": (lambda x: torch.concat(tensors=[x, x], dim=1), JOINED),
    "concatenate": (lambda x: torch.concatenate([x, x], axis=1), JOINED),
    "mean": (lambda x: x.mean(0, True), MEAN),
    "torch.mean": (lambda x: torch.mean(x, axis=0, keepdims=True), MEAN),
    "to": (lambda x: x.to(torch.float64), CONVERTED),
    "double": (lambda x: x.double(), CONVERTED),
    "type": (lambda x: x.type(torch.float64), CONVERTED),
    "T": (lambda x: x.T, ("numpy_T", {"input": "x"})),
    "add": (lambda x: x + 2, ("add", {"input": "x", "other": 2})),
    "iadd": (lambda x: x.__iadd__(2), ("add_", {"input": "x", "other": 2})),
    "xor": (
        lambda x: (x > 0) ^ (x > 1),
        ("bitwise_xor", {"input": "gt", "other": "gt_1"}),
    ),
    "ixor": (
        lambda x: (x > 0).__ixor__(x > 1),
        ("bitwise_xor_", {"input": "gt", "other": "gt_1"}),
    ),
    "truediv": (lambda x: x / 2, ("div", {"input": "x", "other": 2})),
    "matmul": (lambda x: x @ x.T, ("matmul", {"input": "x"})),
    "roll": (lambda x: x.roll(1, 0), ("roll", {"input": "x", "shifts": 1})),
    "split": (lambda x: torch.split(x, 2), ("split", {"split_size": 2, "dim": 0})),
    "split into": (lambda x: x.split([1, 3]), ("split", {"split_size": [1, 3]})),
    "squeeze": (lambda x: x.squeeze(1), ("squeeze", {"input": "x", "dim": [1]})),
    "dropout": (lambda x: F.dropout(x), ("dropout", {"p": 0.5, "training": True})),
    "torch.dropout": (
        lambda x: torch.dropout(x, 0.5, True),
        ("dropout", {"input": "x", "p": 0.5, "training": True}),
    ),
    "conv1d": (
        lambda x: torch.conv1d(x, x[:, None, :3], None, 1, 2, 1, 4),
        ("conv1d", {"input": "x", "stride": 1, "padding": 2, "groups": 4}),
    ),
    "conv1d by names": (
        lambda x: F.conv1d(x, weight=x[:, None, :3], padding=2, groups=4),
        ("conv1d", {"input": "x", "stride": [1], "padding": 2, "groups": 4}),
    ),
    "conv1d of a word": (
        lambda x: F.conv1d(x, x[:, None, :3], padding="same", groups=4),
        ("conv1d", {"input": "x", "padding": "same"}),
    ),
    "getitem": (lambda x: x[1], ("getitem", {"input": "x", "index": 1})),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling):
    fn, (name, arguments) = SPELLINGS[spelling]
    found, given = read(fn)
    assert found == name
    assert arguments.items() <= given.items()


def test_functions_of_users_and_results_that_are_given():
    @torch._dynamo.allow_in_graph
    def transpose(x, dim0, dim1):
        return x.clone()

    assert read(lambda x: transpose(x, 0, 1)) == ("", {})

    def fn(x, y):
        torch.add(x, x, out=y)
        return y

    node = last_call(fn, torch.ones(4, 6), torch.ones(4, 6))
    assert is_in_place(node)
    assert [n.name for n in written_by(node)] == [node.kwargs["out"].name]


def test_sizes_of_a_symbol():
    def fn(x):
        return x.view(x.shape[0] // 2, 2, -1)

    torch._dynamo.reset()
    found = []
    torch.compile(fn, backend=lambda gm, _: found.append(gm) or gm, dynamic=True)(
        torch.ones(4, 6)
    )
    (node,) = [n for n in found[0].graph.nodes if n.target == "view"]
    call = canonical_call(node)
    assert call.overload is aten.view.default
    assert len(call.arguments["size"]) == 3


VIEWS = {  # and whether it is one
    "transpose": (lambda x: x.transpose(0, 1), True),
    "T": (lambda x: x.T, True),
    "reshape": (lambda x: x.reshape(-1), True),
    "float": (lambda x: x.float(), True),
    "type_as": (lambda x: x.type_as(x), True),
    "getitem": (lambda x: x[1:], True),
    "aten": (lambda x: aten.select.int(x, 0, 1), True),
    "clone": (lambda x: x.clone(), False),
    "double": (lambda x: x.double(), False),
    "add": (lambda x: x + 1, False),
    "repeat": (lambda x: x.repeat(2, 1), False),
    "index": (lambda x: x[torch.tensor([1, 0])], False),
    "index of columns": (lambda x: x[:, [1, 0]], False),
}


@pytest.mark.parametrize(("fn", "is_view"), VIEWS.values(), ids=VIEWS)
def test_views(fn, is_view):
    node = last_call(fn, torch.ones(4, 6))
    assert view_of(node) is (node.all_input_nodes[0] if is_view else None)


WRITES = {
    "add_": lambda x, y: x.add_(y),
    "iadd": lambda x, y: x.__iadd__(y),
    "ior": lambda x, y: (x > 0).__ior__(y > 0),
    "setitem": lambda x, y: x.__setitem__(0, 1.0),
    "inplace": lambda x, y: F.relu(x, inplace=True),
    "inplace by position": lambda x, y: F.dropout(x, 0.1, True, True),
    "aten": lambda x, y: aten.copy_.default(x, y),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes(name):
    node = last_call(WRITES[name], torch.ones(4, 6), torch.ones(4, 6))
    assert is_in_place(node)
    assert written_by(node) == [node.args[0]]


@pytest.mark.parametrize(
    "fn",
    # xor is no ior: it has an i nowhere, though or is an operator, too
    [torch.relu, lambda x: x & 1, lambda x: not x.shape, lambda x: (x > 0) ^ (x > 1)],
)
def test_reads(fn):
    def call(x):
        return fn(x), x.abs()

    nodes = dynamo_graph(call, torch.ones(4, 6, dtype=torch.int32)).graph.nodes
    assert not any(is_in_place(x) for x in nodes if x.op.startswith("call_"))


def with_gradients(x):
    with torch.enable_grad():
        return x.sin()


def turned_on_for_good(x):
    torch.set_grad_enabled(True)
    return x.sin()


def without_gradients(x):
    with torch.no_grad():
        return x.sin()


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        (with_gradients, True),
        (turned_on_for_good, True),
        (without_gradients, False),
        (torch.sin, False),
    ],
)
def test_programs_that_enable_gradients(program, wanted):
    """Called without gradients, so that what is in the graph decides."""
    found = []

    def backend(gm, inputs):
        found.append(enables_gradients(gm.graph))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(program, backend=backend)(torch.ones(3))
    assert any(found) == wanted, found


@pytest.mark.parametrize(
    ("fn", "name", "value", "expected"),
    [
        (lambda x: x.view(2, 12), "size", [12, 2], (12, 2)),
        (lambda x: x.view([2, 12]), "size", [12, 2], (12, 2)),
        (lambda x: x.mean(0, True), "keepdim", False, (6,)),
        (lambda x: torch.mean(x, axis=0), "dim", 1, (4,)),
        (lambda x: torch.mean(x, 0), "keepdim", True, (1, 6)),
    ],
)
def test_arguments_are_changed_where_they_are(fn, name, value, expected):
    node = last_call(fn, torch.ones(4, 6))
    set_argument(node, name, value)
    assert canonical_call(node).arguments[name] == value
    node.graph.owning_module.recompile()
    (result,) = node.graph.owning_module(torch.ones(4, 6))
    assert tuple(result.shape) == expected
