"""Where the entries of a dimension go in a call, as DTensor propagates them."""

import logging
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.utils import _pytree as pytree

from cpcompile.passes.flow.flow import Flows
from cpcompile.passes.flow.shaped_calls import ShapedCall, TensorShape
from cpcompile.passes.graph.sequence_tokens import TokenDim

N = 6  # entries
SUM = Partial()


def flow_of(function, operands, roles, entries=N, flows=None):
    """The flow of function(*operands), where an operand is a shape or no tensor."""
    values = [
        TensorShape.of(torch.empty(x)) if type(x) is list else x for x in operands
    ]
    _, spec = pytree.tree_flatten((tuple(range(len(values))), {}))
    flows = flows or Flows(FakeTensorMode(), "cpu")
    return flows.of(ShapedCall(function, values, spec), roles, entries)


# (call, shapes, roles of the operands) -> role of the result; any dimension may be cut
LOCAL = {
    "tokens": (torch.tanh, [[2, N, 4]], [TokenDim(1)], TokenDim(1)),
    "batch entries": (lambda x: x.softmax(-1), [[N, 4]], [TokenDim(0)], TokenDim(0)),
    "heads": (
        torch.matmul,
        [[2, N, 5, 3], [2, N, 3, 5]],
        [TokenDim(1)] * 2,
        TokenDim(1),
    ),
    "channels of a weight": (
        torch.mm,
        [[3, 4], [4, N]],
        [None, TokenDim(1)],
        TokenDim(1),
    ),
    "inner dimension": (torch.mm, [[3, N], [N, 4]], [TokenDim(1), TokenDim(0)], SUM),
    "a sum of sums": (torch.add, [[3, 4], [3, 4]], [SUM, SUM], SUM),
    "flattened": (
        lambda x: x.flatten(0, 1),
        [[2, N, 4]],
        [TokenDim(1)],
        TokenDim(0, 2),
    ),
    "same for all": (torch.tanh, [[2, 4]], [None], None),
}


@pytest.mark.parametrize("name", LOCAL)
def test_each_entry_is_computed_by_itself(name):
    function, shapes, roles, wanted = LOCAL[name]
    flow = flow_of(function, shapes, roles)
    assert flow.is_local
    assert [x.role for x in flow.tensors] == [wanted]


MEETING = {
    "softmax": (lambda x: x.softmax(1), [[2, N, 4]], [TokenDim(1)]),
    "scan": (lambda x: x.cumsum(1), [[2, N, 4]], [TokenDim(1)]),
    "product over a cut and a whole": (torch.mm, [[N, N], [N, 4]], [TokenDim(0)] * 2),
    "shift": (lambda x: x.roll(1, 1), [[2, N, 4]], [TokenDim(1)]),
}


@pytest.mark.parametrize("name", MEETING)
def test_entries_that_meet_have_no_flow(name):
    assert flow_of(*MEETING[name]) is None


TABLE = [[2, N, 4], [N, 4]]
# what is not local, and why: it cuts an operand, or inside, adds up a sum, or draws
FACTS = {
    "cut": (torch.add, TABLE, {1: TokenDim(0)}),
    "cuts_inside": (lambda x, table: x + table.tanh(), TABLE, True),
    "ends_sums": (lambda x: x.sum(1).tanh(), TABLE[:1], True),
    "draws": (torch.bernoulli, TABLE[:1], True),
}


@pytest.mark.parametrize("fact", FACTS)
def test_what_is_not_local(fact):
    function, shapes, value = FACTS[fact]
    flow = flow_of(function, shapes, [TokenDim(1), None][: len(shapes)])
    assert getattr(flow, fact) == value and not flow.is_local
    assert fact == "cut" or not flow.cut
    if fact == "cut":
        again = flow_of(function, shapes, [TokenDim(1), TokenDim(0)])
        assert again.is_local and again.tensors == flow.tensors


def with_no_such_index(x):
    index = torch.zeros(3, 3, dtype=torch.long)
    return x + torch.zeros(2, 4).gather(1, index)  # of two rows three


def test_a_call_that_is_tried_logs_no_error():
    """torch logs what a fake call raises with a traceback, and we take it for a no."""
    logged = mock.Mock(level=logging.ERROR)
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(logged)
    try:
        assert flow_of(with_no_such_index, [[2, N, 4]], [TokenDim(1)]) is None
    finally:
        log.removeHandler(logged)
    assert not logged.handle.called


def test_answers_are_remembered_by_all_that_they_depend_on():
    flows = Flows(FakeTensorMode(), "cpu")
    question = (torch.tanh, [[2, N, 4]], [TokenDim(1)])
    first = flow_of(*question, flows=flows)
    with mock.patch.object(Flows, "_ask", return_value=None) as ask:
        assert flow_of(*question, flows=flows) is first
        assert not ask.called
        for other in (
            (torch.sin, *question[1:]),
            (torch.tanh, [[2, N, 5]], [TokenDim(1)]),
            (torch.tanh, [[2, N, 4]], [None]),
        ):
            assert flow_of(*other, flows=flows) is None
        assert flow_of(*question, entries=3, flows=flows) is None
    assert ask.call_count == 4


def test_answers_do_not_reach_a_mesh_of_the_user():
    """DTensor remembers results by meshes that are equal, not by the same mesh."""
    flow_of(torch.tanh, [[2, 2, 4]], [TokenDim(1)], entries=2)
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)
    local = torch.zeros(2, 1, 4)
    tokens = DTensor.from_local(local, mesh, [Shard(1)], run_check=False)
    assert torch.tanh(tokens).device_mesh is mesh
