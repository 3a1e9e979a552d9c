"""Where the tokens of every value are, read backwards from attention."""

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from cpcompile.passes.graph.nodes import all_nodes, fake_mode_of
from cpcompile.passes.graph.sequence_tokens import TokenDim
from cpcompile.passes.model.tokens.dim_flows import token_operands
from cpcompile.passes.model.tokens.sequence_dims import SequenceDims
from tests.golden.operands import attend


def traced(fn, *args, **kwargs):
    """The graph that Dynamo makes of a call."""
    graphs = []

    def keep(gm, _):
        graphs.append(gm.graph)
        return gm.forward

    torch.compile(fn, backend=keep, fullgraph=True, **kwargs)(*args)
    (graph,) = graphs
    return graph


def read(graph, mesh):
    calls = [node for node in all_nodes(graph) if token_operands(node)]
    operands = [x for node in calls for x in token_operands(node)]
    return SequenceDims(graph, operands, fake_mode_of(graph), mesh, 0)


def dims(fn, *args, mesh, **kwargs):
    """The dimension of the tokens of every value that has one, by the node's name."""
    graph = traced(fn, *args, **kwargs)
    sequence_dims = read(graph, mesh)
    found = {node.name: sequence_dims.of(node) for node in all_nodes(graph)}
    return {name: dim for name, dim in found.items() if dim is not None}


def test_batch_and_tokens_in_one_dimension(mesh):
    def flat(x):
        return attend(x.view(32, 8).relu().view(2, 16, 8))

    found = dims(flat, torch.randn(2, 16, 8), mesh=mesh)
    assert found["relu"] == TokenDim(0, outer=2) and found["l_x_"] == TokenDim(1)


def test_batches_that_are_joined_are_no_longer_sequence(mesh):
    """Flattened: a run of a part of the batch would be no part of every sequence."""

    def joined(x, y):
        flat = torch.cat([x.view(32, 8).relu(), y.view(32, 8).sin()])
        return attend(flat.view(4, 16, 8))

    x = torch.randn(2, 16, 8)
    found = dims(joined, x, x + 1, mesh=mesh)
    assert found["flat"] == TokenDim(0, outer=4)
    assert "relu" not in found and "sin" not in found


def test_tokens_that_are_merged(mesh):
    """Two rows of the input are one token: 32 rows are cut between tokens."""
    x = torch.randn(2, 32, 8)
    merge = lambda x: attend(x.relu().reshape(2, 16, 16))  # noqa: E731
    assert dims(merge, x, mesh=mesh)["relu"] == TokenDim(1)
    merge = lambda x: attend(x.relu().reshape(2, 15, 16))  # noqa: E731
    found = dims(merge, x[:, :30], mesh=mesh)
    assert "relu" not in found and found["reshape"] == TokenDim(1)


def test_windows(mesh):
    """Attention in windows of 8: they are the sequence, and begin at the view."""

    def windows(x):
        return attend(x.relu().view(2 * 4, 8, 8).sin())

    found = dims(windows, torch.randn(2, 32, 8), mesh=mesh)
    assert "relu" not in found and found["sin"] == TokenDim(1)


def test_a_whole_sequence_wins_over_its_windows(mesh):
    """Of both readings of one dimension the one counts that a rank cuts in runs."""

    def windows(x):
        return attend(x.unflatten(1, (4, 8)).flatten(0, 1))

    x = torch.randn(2, 32, 8)
    found = dims(lambda x: windows(x.relu()), x, mesh=mesh)
    assert found["relu"] == TokenDim(1, outer=4)
    found = dims(lambda x: attend(windows(x.relu()).view(2, 32, 8)), x, mesh=mesh)
    assert found["relu"] == TokenDim(1, outer=4)

    def both(x):
        y = x.relu()
        return windows(y).view(2, 32, 8) + attend(y)

    graph = traced(both, x)
    (node,) = (node for node in graph.nodes if node.name == "y")
    sequence_dims = read(graph, mesh)
    assert {x.dim.outer for x in sequence_dims.found[node]} == {1, 4}
    assert sequence_dims.of(node) == TokenDim(1)


def test_through_checkpoint_regions(mesh):
    def recomputed(x):
        x = x.relu()
        x = checkpoint(lambda x: attend(x.sin()).cos(), x, use_reentrant=False)
        return attend(x)

    x = torch.randn(2, 16, 16, requires_grad=True)
    found = dims(recomputed, x, mesh=mesh)
    for name in ("l_x_", "x", "sin", "cos"):
        assert found[name] == TokenDim(1), found


def test_joined_streams_have_lengths_of_their_own(mesh):
    def joined(x, y):
        return attend(torch.cat([x.relu(), y.sin()], 1).roll(1, 1))

    graph = traced(joined, torch.randn(2, 24, 16), torch.randn(2, 16, 16))
    sequence_dims = read(graph, mesh)
    found = {node.name: sequence_dims.found.get(node) for node in graph.nodes}
    assert [x.tokens for x in found["relu"]] == [24]
    assert [x.tokens for x in found["sin"]] == [16]
    assert [x.tokens for x in found["cat"]] == [40]


def test_too_few_tokens_stay_whole(mesh):
    """9 tokens on 8 ranks: two each, and none for the last three."""
    joined = lambda x, y: attend(torch.cat([x.relu(), y.sin()], 1))  # noqa: E731
    found = dims(joined, torch.randn(2, 23, 16), torch.randn(2, 9, 16), mesh=mesh)
    assert "relu" in found and "cat" in found and "sin" not in found


@pytest.mark.parametrize("dynamic", [True, False])
def test_symbolic_lengths(mesh, dynamic):
    """Asked of the sizes of this call; no guard is added."""
    table = nn.Embedding(50, 16)

    def layer(ids):
        x = table(ids)
        return attend(x.view(-1, 16).relu().view(ids.shape[0], -1, 16))

    found = dims(layer, torch.randint(50, (2, 24)), mesh=mesh, dynamic=dynamic)
    assert found["l_ids_"] == TokenDim(1)
    assert found["relu"] == TokenDim(0, outer=2)


def test_a_convolution_is_where_tokens_begin(mesh):
    """Unless it gives as many as it takes."""
    same, fewer = nn.Conv1d(8, 16, 3, padding=1), nn.Conv1d(16, 16, 3, 2, 1)
    x = torch.randn(2, 8, 48)
    graph = traced(lambda x: attend(fewer(same(x)).transpose(1, 2)), x)
    sequence_dims = read(graph, mesh)
    assert [n.name for n in sequence_dims.begins] == ["conv1d_1"]
    assert not any(n.op == "placeholder" for n in sequence_dims.found)
    graph = traced(lambda x: attend(same(x).transpose(1, 2)), x)
    sequence_dims = read(graph, mesh)
    assert not sequence_dims.begins
    assert [n.name for n in sequence_dims.found if n.op == "placeholder"] == ["l_x_"]
