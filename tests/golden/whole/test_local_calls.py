"""What one call is on this rank."""

import pytest
import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard

from cpcompile.errors import RewriteError
from cpcompile.geometry.layout import Layout
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
    calls = LocalCalls(mesh, {})
    with FakeTensorMode(), torch.no_grad():
        x = shard(mesh, 2, 10, 8)
        one, other = (calls.of(aten.sin.default, (x,)).results[0] for _ in range(2))
        assert one is other
        product = calls.of(aten.mul.Tensor, (one, other)).module
    (mul,) = product.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert mul.args[0] is not mul.args[1]
    assert (calls.runs, calls.copies) == (2, 1)


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
        with pytest.raises(RewriteError, match="by their number"):  # of any rank
            calls.of(rules.of(aten.embedding.default), (rows, labels))


def test_what_is_whole_is_cut_in_order_as_a_table_with_fewer_dimensions(mesh):
    rules = CallRules(TokenOrder(MeshAxis(mesh, 0), Layout.ZIGZAG, [8]))
    x, table = torch.arange(16.0).view(2, 8, 1), shard(mesh, 8, 1, dim=0).zero_()
    found = rules.of(aten.add.Tensor)(replicated(x, mesh), table)
    assert found.to_local().flatten().tolist() == [1, 6, 9, 14]  # of rank 1


def test_constants_of_calls_that_are_alike_keep_their_names():
    module = fx.GraphModule(torch.nn.Module(), fx.Graph())
    one, other = torch.zeros(1), torch.ones(1)
    written = [(_constant(module.graph, x).target, x) for x in (one, one, other)]
    assert all(getattr(module, name) is x for name, x in written)


def test_numbers_are_drawn_for_all_tokens(mesh):
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
