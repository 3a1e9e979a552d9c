"""requires_grad_ of a value inside of a graph breaks it only where that matters."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel

from cpcompile import backend
from cpcompile.reporting.graph_report import recording

IDS = torch.arange(8)[None]
MESH_AXES = {"cp": 2}


class Adapted(nn.Module):
    """A frozen model whose embedding has the hook, and an adapter that is trained.

    results: what the caller gets, of the embedded tokens, of attention to them, and
        of what the adapter makes of that.
    """

    def __init__(self, results: Callable[[Tensor, Tensor, Tensor], object]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4).requires_grad_(False)
        self.adapter = nn.Linear(4, 4)
        self.embedding.register_forward_hook(lambda m, i, out: out.requires_grad_(True))
        self.results = results

    def forward(self, ids: Tensor) -> object:
        x = self.embedding(ids)
        y = x.unflatten(-1, (2, 2)).transpose(1, 2)
        y = F.scaled_dot_product_attention(y, y, y, is_causal=True)
        y = y.transpose(1, 2).flatten(2)
        return self.results(x, y, self.adapter(y))


@pytest.fixture
def options(mesh):
    return {"mesh": mesh, "inner": "aot_eager"}


def outcome(results, options) -> tuple[int, list[bool]]:
    """The number of graphs, and which results require a gradient."""
    torch._dynamo.reset()
    compiled = torch.compile(Adapted(results), backend="cp", options=options)
    with recording() as reports:
        values = compiled(IDS)
    return len(reports), [x.requires_grad for x in values]


@pytest.mark.parametrize(
    "results",
    [lambda x, y, z: (z.sum(),), lambda x, y, z: (z + x, x.detach(), y.detach().sum())],
)
def test_results_of_the_adapter(options, results):
    count, requires = outcome(results, options)
    assert (count, requires[0]) == (1, True)
    assert not any(requires[1:])


def returned(x, y, z):
    return z.sum(), x


def derived(x, y, z):
    return z.sum(), y


@pytest.mark.parametrize("results", [returned, derived])
def test_results_that_require_a_gradient_of_it_alone(options, results):
    """Without the call the second one would need no gradient: the graph breaks."""
    count, requires = outcome(results, options)
    assert count > 1
    assert requires == [True, True]


def test_what_is_left_of_the_call(options, monkeypatch):
    def results(x, y, z):
        return (torch.autograd.grad(z.square().sum(), x)[0], z)

    _, requires = outcome(results, options)
    assert requires == [False, True]
    graphs = []
    original = backend.agreed_request

    def request(graph, *args, **kwargs):
        graphs.append([str(node.target) for node in graph.nodes])
        return original(graph, *args, **kwargs)

    monkeypatch.setattr(backend, "agreed_request", request)
    outcome(lambda x, y, z: (z,), options)
    (targets,) = graphs
    assert not [x for x in targets if "requires_grad" in x]


def test_under_ddp_and_other_backends(options):
    ddp = DistributedDataParallel(Adapted(lambda x, y, z: z))
    with recording() as reports:
        torch.compile(ddp, backend="cp", options=options)(IDS)
    assert len(reports) == 1
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    torch.compile(Adapted(lambda x, y, z: (z,)), backend=counter)(IDS)
    assert counter.frame_count > 1
