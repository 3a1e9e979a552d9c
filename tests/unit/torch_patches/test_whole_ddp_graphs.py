"""DDPOptimizer cuts the graphs of other backends, and none of backend "cp"."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.parallel import DistributedDataParallel

from cpcompile import backend
from cpcompile.reporting.graph_report import recording
from cpcompile.torch_patches import graph_breaks

X = torch.randn(1, 8, 4)
MESH_AXES = {"cp": 2}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.wide = nn.Linear(4, 2**17)  # more than a first bucket

    def forward(self, x):
        y = self.project(x).unflatten(-1, (2, 2)).transpose(1, 2)
        y = F.scaled_dot_product_attention(y, y, y, is_causal=True)
        x = x + y.transpose(1, 2).flatten(2)
        return x + self.wide(x)[..., :4]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def options(mesh):
    return {"mesh": mesh, "inner": "aot_eager"}


def calls_per_graph(compiled):
    with recording() as reports:
        compiled(X)
    return [len(report.calls) for report in reports]


@pytest.mark.parametrize("megabytes", [1, 0.001, 25])
def test_a_graph_of_cp_stays_whole(options, megabytes):
    """Buckets smaller than the first one of DDP are an assertion of DDPOptimizer."""
    ddp = DistributedDataParallel(Model(), bucket_cap_mb=megabytes)
    assert calls_per_graph(torch.compile(ddp, backend="cp", options=options)) == [3]
    assert torch._dynamo.config.optimize_ddp is True


def test_a_model_that_is_compiled_before_it_is_wrapped(options):
    model = Model()
    model.compile(backend="cp", options=options)
    assert calls_per_graph(DistributedDataParallel(model, bucket_cap_mb=1)) == [3]


def test_graphs_of_other_backends_are_cut(options):
    """Each as DDP's buckets are."""
    ddp = DistributedDataParallel(Model(), bucket_cap_mb=1)
    torch.compile(ddp, backend="cp", options=options)(X)
    torch._dynamo.reset()
    graphs = []

    def keep(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    torch.compile(ddp, backend=keep)(X)
    assert len(graphs) > 1


def after_a_function(options):
    def call(gm, example_inputs):
        return backend.cp(gm, example_inputs, options=options)

    ddp = DistributedDataParallel(Model(), bucket_cap_mb=1)
    return torch.compile(ddp, backend=call)


def test_pieces(options, caplog):
    # Nobody sees that a function of the user ends in backend "cp".
    text = r"forward is a piece of a graph that DDPOptimizer has cut.*optimize_ddp"
    with pytest.raises(BackendCompilerFailed, match=text):
        after_a_function(options)(X)
    compiled = after_a_function(options | {"strict": False})
    compiled(X)
    (text,) = {x for x in caplog.messages if "DDPOptimizer" in x}
    assert text.startswith(
        "forward runs unsharded, with all of its work on every rank: it is a piece"
    )


def late_gradients(caplog):
    return [x for x in caplog.messages if "when the backward has ended" in x]


def test_gradients_that_are_not_sent_beside_the_backward(options, caplog):
    ddp = DistributedDataParallel(Model(), bucket_cap_mb=1)
    torch.compile(ddp, backend="cp", options=options)(X)
    (text,) = late_gradients(caplog)
    assert text.startswith("forward: DDP sums 7.86 MB of gradients over 2 ranks when")
    assert "cp.ContextParallel()" in text
    assert "torch._dynamo.config.optimize_ddp = False" in text


def test_what_nobody_has_to_be_told(options, caplog):
    """One bucket; no gradients; no DDPOptimizer; blocks, which send one by one."""
    model = Model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=25)
    compiled = torch.compile(ddp, backend="cp", options=options)
    compiled(X)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    with torch.no_grad():
        torch.compile(ddp, backend="cp", options=options)(X)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(optimize_ddp=False):
        torch.compile(ddp, backend="cp", options=options)(X)
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend="cp", options=options)
    DistributedDataParallel(model, bucket_cap_mb=1)(X)
    assert not late_gradients(caplog)


class Broken(Block):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


def test_a_break_is_told(options):
    """What asks in whose graph Dynamo is finds the backend behind DDPOptimizer."""
    graph_breaks.forget()
    ddp = DistributedDataParallel(Broken())
    torch.compile(ddp, backend="cp", options=options)(X)
    texts = [x.text for x in graph_breaks.breaks()]
    assert any("torch._dynamo.graph_break()" in text for text in texts)
