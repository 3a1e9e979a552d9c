"""What one call is on this rank."""

import pytest
import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard

from cpcompile.errors import RewriteError
from cpcompile.passes.graph.constant_arguments import MeshAxis
from cpcompile.passes.whole.call_rules import CallRules
from cpcompile.passes.whole.edges import placed_as
from cpcompile.passes.whole.local_calls import LocalCalls, _constant, replicated
from cpcompile.passes.whole.token_order import TokenOrder

MESH_AXES = {"cp": 4}
aten = torch.ops.aten


def shard(mesh, *shape, dim=1, **how):
    return placed_as(replicated(torch.empty(shape, **how), mesh), (Shard(dim),))


def test_results_of_alike_calls_are_told_apart(mesh):
    """They have one value; a product of the two is no square."""
    calls = LocalCalls(mesh, {})
    with FakeTensorMode(), torch.no_grad():
        x = shard(mesh, 2, 10, 8)
        one, other = (calls.of(aten.sin.default, (x,)).results[0] for _ in range(2))
        assert one is other
        product = calls.of(aten.mul.Tensor, (one, other)).module
    (mul,) = product.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert mul.args[0] is not mul.args[1]
    assert (calls.runs, calls.copies) == (2, 1)


def test_a_call_that_sends_says_so(mesh):
    calls = LocalCalls(mesh, {})
    with FakeTensorMode(), torch.no_grad():
        x = shard(mesh, 2, 10, 8)
        assert not calls.of(aten.sum.dim_IntList, (x, [-1])).sends
        assert calls.of(placed_as, (x, (Replicate(),))).sends


def test_rows_of_a_flattened_batch_are_looked_up_in_place(mesh):
    """Labels are whole; each rank cuts its rows of them, and sends nothing."""
    calls, rules = LocalCalls(mesh, {}), CallRules(TokenOrder(MeshAxis(mesh, 0)))
    with FakeTensorMode(), torch.no_grad():
        rows = shard(mesh, 2, 10, 16).view(20, 16)
        labels = torch.empty(20, 1, dtype=torch.long)
        for call, value in ((aten.gather.default, ()), (aten.scatter.value, (-1.0,))):
            found = calls.of(rules.of(call), (rows, 1, labels, *value))
            assert not found.sends
            assert found.results[0].placements == rows.placements


def test_constants_of_calls_that_are_alike_keep_their_names():
    module = fx.GraphModule(torch.nn.Module(), fx.Graph())
    one, other = torch.zeros(1), torch.ones(1)
    written = [(_constant(module.graph, x).target, x) for x in (one, one, other)]
    assert all(getattr(module, name) is x for name, x in written)


def test_numbers_are_drawn_for_all_tokens(mesh):
    """Each rank reads its rows of one mask; other random calls refuse shards."""
    calls, rules = LocalCalls(mesh, {}), CallRules(TokenOrder(MeshAxis(mesh, 0)))
    dropout = aten.native_dropout.default
    with FakeTensorMode(), torch.no_grad():
        x = shard(mesh, 2, 10, 8)
        found = calls.of(rules.of(dropout), (x, 0.5, True))
        assert not found.sends
        assert [y.placements for y in found.results] == 2 * [x.placements]
        graph = found.module.graph
        (drawn,) = graph.find_nodes(op="call_function", target=dropout)
        assert drawn.meta["val"][0].shape == x.shape
        with pytest.raises(RewriteError, match="the same random numbers"):
            calls.of(rules.of(aten.bernoulli.default), (x,))
