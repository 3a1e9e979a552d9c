"""Graphs that are traced to different programs have different texts."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.fx as fx
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from cpcompile.compile import assembly, warm_start
from cpcompile.compile import graph_text as module
from cpcompile.compile.graph_text import NoText, graph_text
from tests.golden.capture import fake_group


class Model(nn.Module):
    def __init__(self, **given: object) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.given = {"eps": 1e-5, "p": 0.1, "causal": True, "dtype": None} | given

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(self.first(x), (8,), eps=self.given["eps"])
        x = F.dropout(x, self.given["p"]).unsqueeze(1)
        x = F.scaled_dot_product_attention(x, x, x, is_causal=self.given["causal"])
        total = x.sum(-2, dtype=self.given["dtype"])
        return self.second(total.to(x.dtype)).square().mean()


def text_of(
    model: nn.Module,
    rank: int = 1,
    ranks: int = 4,
    **options: object,
) -> str:
    """Of the graph that is compiled."""
    found = []

    def compiled(gm, inputs, how, hear):
        found.append(graph_text(gm))
        return warm_start.compiled_or_loaded(gm, inputs, how, hear)

    torch._dynamo.reset()
    with (
        fake_group(rank, ranks),
        mock.patch.object(assembly, "compiled_or_loaded", compiled),
    ):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
        given = {
            "mesh": mesh,
            "shard": {"x" if isinstance(model, Model) else "input": 1},
            "inner": "aot_eager",
        } | options
        call = torch.compile(model, backend="cp", options=given)
        call(torch.ones(2, 64, 8))
    (text,) = found
    return text


TWINS = {
    "constant": {"model": Model(eps=1e-6)},
    "dropout": {"model": Model(p=0.2)},
    "mask": {"model": Model(causal=False)},
    "dtype of a sum": {"model": Model(dtype=torch.float64)},
    "ranks": {"ranks": 2},
    "rank": {"rank": 2},
    "strategy": {"strategy": "all_gather"},
    "layout": {"layout": "zigzag", "strategy": "ring"},
    "module": {"model": nn.Sequential(Model())},
}


@pytest.mark.parametrize("twin", TWINS.values(), ids=TWINS)
@pytest.mark.slow(but_every=3)
def test_a_twin_has_another_text(twin: dict) -> None:
    given = {"model": Model(), "strategy": "ring", "layout": "contiguous"}
    assert text_of(**given) != text_of(**given | twin)


def test_the_same_graph_has_the_same_text() -> None:
    assert text_of(Model()) == text_of(Model())


def graph_of(target: object, *args: object) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(target, (x, *args)))
    return fx.GraphModule({}, graph)


def scaled(x: Tensor) -> Tensor:
    return x * 2


def holding(held: object) -> object:
    """A function of ours that was made at run time."""

    def call(x: Tensor) -> Tensor:
        return x * held

    call.__module__ = "cpcompile.passes.somewhere"
    return call


def test_what_a_function_holds_counts() -> None:
    assert graph_text(graph_of(holding(2.0))) != graph_text(graph_of(holding(3.0)))
    assert graph_text(graph_of(holding(2.0))) == graph_text(graph_of(holding(2.0)))


def test_every_bit_of_a_tensor_that_is_held_counts() -> None:
    x, y = torch.arange(3.0), torch.arange(3.0)
    texts = [graph_text(graph_of(holding(z))) for z in (x, y, x.double(), x[None])]
    assert texts[0] == texts[1] and len(set(texts)) == 3
    y[2] = torch.nextafter(y[2], y[1])
    assert graph_text(graph_of(holding(y))) not in texts


def test_defaults_count() -> None:
    def with_default(factor: float) -> object:
        def call(x: Tensor, times: float = factor) -> Tensor:
            return x * times

        call.__module__ = "cpcompile.passes.somewhere"
        return call

    texts = {graph_text(graph_of(with_default(n))) for n in (2.0, 3.0)}
    assert len(texts) == 2


@pytest.mark.parametrize("kernels", [(), ("a kernel",)])
def test_a_triton_kernel_of_the_user_has_no_text(kernels: tuple[str, ...]) -> None:
    """Its source is in no text; torch registers it with an operator."""
    target = torch.ops.aten.sin.default
    registered = {target._schema.name: list(kernels)}
    with mock.patch.object(
        module, "get_triton_kernels_for_op", lambda name: registered[name]
    ):
        if not kernels:
            graph_text(graph_of(target))
            return
        with pytest.raises(NoText, match="runs a Triton kernel of the user"):
            graph_text(graph_of(target))


def test_methods_of_tensors() -> None:
    texts = {graph_text(graph_of(x)) for x in (torch.Tensor.sin, torch.Tensor.cos)}
    assert len(texts) == 2


@pytest.mark.parametrize(
    "target",
    [
        scaled,
        holding(object()),
        holding(torch.ones(2, requires_grad=True)),
        holding(torch.ones(2).to_sparse()),
        holding(scaled),
    ],
    ids=["function", "object", "weight", "sparse", "held function"],
)
def test_what_cannot_be_said_has_no_text(target: object) -> None:
    with pytest.raises(NoText):
        graph_text(graph_of(target))


def test_a_tensor_of_the_graph_has_no_text() -> None:
    """Its values would have to be in the text."""
    graph = fx.Graph()
    graph.output(graph.get_attr("table"))
    gm = fx.GraphModule({"table": torch.ones(2)}, graph)
    with pytest.raises(NoText, match="table is Tensor of the graph"):
        graph_text(gm)
