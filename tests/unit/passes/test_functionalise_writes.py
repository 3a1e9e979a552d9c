"""Programs that write through views compute the same after functionalise_writes."""

import pytest
import torch
import torch.fx as fx

from cpcompile.passes.graph.effects import is_in_place
from cpcompile.passes.graph.nodes import storage
from cpcompile.passes.model.mutation.functionalise_writes import functionalise_writes
from tests.support.bounds import assert_close, assert_equal
from tests.support.dynamo_graphs import dynamo_graph
from tests.support.writes import program


@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed):
    fn = program(seed, 4 + seed % 9)
    torch.manual_seed(seed)
    x = torch.randn(4, 6, 4)
    wanted = fn(x)
    gm = dynamo_graph(fn, x)
    functionalise_writes(gm.graph, None)
    gm.graph.lint()
    gm.recompile()
    for got, expected in zip(fx.Interpreter(gm).run(x), wanted, strict=True):
        assert_equal("result", got, expected)
    assert not list(aliases_read_later(gm.graph)), "no other name is read after a write"


def aliases_read_later(graph):
    """Writes whose memory is read under another name later, where none is an input."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    for write in graph.nodes:
        if write.op not in ("call_function", "call_method") or not is_in_place(write):
            continue
        base = write.args[0]
        for other in graph.nodes:
            if other in (base, write) or order[other] > order[write]:
                continue
            same = storage(other) is not None and storage(other) == storage(base)
            if same and any(order[user] > order[write] for user in other.users):
                yield write, other


def test_gradients():
    def fn(x):
        y = x * 2
        first = y[:, :2]
        rest = y[:, 2:]
        first.mul_(x[:, :2])
        rest.add_(first[:, :1])
        return (y * y).sum() + first.sum()

    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(fn(x), x)
    gm = dynamo_graph(fn, x)
    assert functionalise_writes(gm.graph, None) == 2
    gm.recompile()
    (result,) = fx.Interpreter(gm).run(x)
    (got,) = torch.autograd.grad(result, x)
    assert_close("grad of x", got, wanted)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.relu().add_(1) * 2,  # nobody else sees it
        lambda x: x[:, 0].mul_(2) + x[:, 1],  # the caller sees it
        lambda x: x.long()[:, 0].mul_(2) + x.long()[:, 1],  # nothing is sharded
        lambda x: x.relu()[:, 0].mul_(2) + x[:, 1],
        lambda x: torch.mul(input=x, other=2).add_(1),  # keywords only
    ],
)
def test_what_stays(fn):
    gm = dynamo_graph(fn, torch.randn(3, 5))
    before = str(gm.graph)
    assert functionalise_writes(gm.graph, None) == 0
    assert str(gm.graph) == before
