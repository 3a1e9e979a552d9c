"""Graphs that are traced to different programs have different keys in torch's cache."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._functorch._aot_autograd import autograd_cache
from torch._functorch._aot_autograd.schemas import AOTConfig
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cpcompile.compile import assembly, torch_cache, warm_start
from cpcompile.compile.torch_cache import NoKey, ProgramKey
from cpcompile.passes.graph.constant_arguments import (
    Callee,
    Constant,
    GraphArgument,
    MeshAxis,
    Method,
)
from cpcompile.passes.whole.leave_for_later import cp_unreduced
from tests.golden.capture import fake_group, fake_mesh


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


def key_of(gm: fx.GraphModule, inputs: list[object] = [], text: str = "") -> str:  # noqa: B006
    """The key under which AOTAutograd's cache would keep the program of `gm`."""
    key = ProgramKey.of(gm, text, "sources")
    config = AOTConfig(None, None, None, {}, 0, 0, False)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with tracing(TracingContext(mode)), torch_cache._key_of(key):
        name, _ = autograd_cache.autograd_cache_key(gm, inputs, config, None)
    return name


def compiled_key(
    model: nn.Module,
    rank: int = 1,
    ranks: int = 4,
    **options: object,
) -> str:
    """The key of the graph that is compiled."""
    found = []

    def compiled(gm, inputs, how, all_gather_text):
        found.append(key_of(gm, text=warm_start._key(gm, how).text))
        return warm_start.compiled_or_loaded(gm, inputs, how, all_gather_text)

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
    (key,) = found
    return key


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
def test_a_twin_has_another_key(twin: dict) -> None:
    given = {"model": Model(), "strategy": "ring", "layout": "contiguous"}
    assert compiled_key(**given) != compiled_key(**given | twin)


def test_keys_of_graphs() -> None:
    assert compiled_key(Model()) == compiled_key(Model())
    graphs = [graph_of(x) for x in (torch.Tensor.sin, torch.Tensor.cos)]
    for gm in graphs:
        next(iter(gm.graph.nodes)).meta["example_value"] = torch.ones(2)
    assert len(set(map(key_of, graphs))) == 2
    # torch's key has its shape, and not its values.
    graph = fx.Graph()
    graph.output(graph.get_attr("table"))
    gm = fx.GraphModule({"table": torch.ones(2)}, graph)
    with pytest.raises(NoKey, match="table is a tensor of the graph"):
        key_of(gm)


def graph_of(target: object, *args: object) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(target, (x, *args)))
    return fx.GraphModule({}, graph)


def holding(*args: object) -> fx.GraphModule:
    """A graph with a call of ours that holds something."""
    return graph_of(cp_unreduced, *args)


def body(factor: float) -> fx.GraphModule:
    return graph_of(torch.mul, factor)


VALUES = torch.arange(3.0)
CHANGED = VALUES.clone()
CHANGED[2] = torch.nextafter(VALUES[2], VALUES[1])
HELD = {
    "a value": (Constant(VALUES), Constant(CHANGED)),
    "a dtype": (Constant(VALUES), Constant(VALUES.double())),
    "a shape": (Constant(VALUES), Constant(VALUES[None])),
    "a function": (Callee(torch.sin), Callee(torch.cos)),
    "a method": (Callee(Method("sin")), Callee(Method("cos"))),
    "an overload": (
        Callee(torch.ops.aten.add.Tensor),
        Callee(torch.ops.aten.add.Scalar),
    ),
    "a graph": (GraphArgument(body(2.0)), GraphArgument(body(3.0))),
}


@pytest.mark.parametrize(("one", "other"), HELD.values(), ids=HELD)
def test_what_a_call_holds_counts(one, other) -> None:
    assert key_of(holding(one)) == key_of(holding(one))
    assert key_of(holding(one)) != key_of(holding(other))


def test_meshes_of_one_shape_have_other_groups() -> None:
    with fake_mesh(4, rank=0) as mesh:
        group = dist.new_group()
        other = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
        assert mesh == other, "torch takes them for equal"
        assert MeshAxis(mesh) != MeshAxis(other)
        keys = {key_of(holding(MeshAxis(x))) for x in (mesh, other)}
    assert len(keys) == 2


def test_a_triton_kernel_of_the_user_has_no_key() -> None:
    """Its source is in no text; torch registers it with an operator."""
    target, kernels = torch.ops.aten.sin.default, []
    found = mock.patch.object(
        torch_cache, "get_triton_kernels_for_op", lambda name: list(kernels)
    )
    with found:
        key_of(holding(Callee(target)))
        kernels.append("a kernel")
        with pytest.raises(NoKey, match="runs a Triton kernel of the user"):
            key_of(holding(Callee(target)))


def scaled(x: Tensor) -> Tensor:
    return x * 2


def made() -> object:
    """A function of ours that was made at run time, and may hold anything."""

    def call(x: Tensor) -> Tensor:
        return x * 2

    call.__module__ = "cpcompile.passes.graph.constant_arguments"
    return call


@pytest.mark.parametrize(
    "gm",
    [
        graph_of(scaled),
        holding(Callee(scaled)),
        holding(GraphArgument(graph_of(scaled))),
        graph_of(made()),
    ],
    ids=["function", "callee", "function of a graph", "made"],
)
def test_what_cannot_be_said_has_no_key(gm: fx.GraphModule) -> None:
    with pytest.raises(NoKey, match=r"scaled|made at run time"):
        key_of(gm)


def of(x: Tensor, text: str = "") -> str:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    return key_of(body(2.0), [mode.from_tensor(x, static_shapes=True)], text)


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(4, 6, dtype=torch.bfloat16),
        torch.ones(6, 4).T,
        torch.ones(4, 7),
        torch.ones(4, 6, requires_grad=True),
    ],
    ids=["dtype", "memory order", "shape", "gradient"],
)
def test_other_inputs_have_another_key(other: Tensor) -> None:
    """And so have another text, and other settings."""
    mine = of(torch.ones(4, 6))
    assert of(torch.zeros(4, 6)) == mine != of(other)
    assert of(torch.ones(4, 6), "rank 1") != mine
    with torch._inductor.config.patch(max_autotune=True):
        assert of(torch.ones(4, 6)) != mine


@pytest.mark.parametrize("of_dynamo", [True, False])
def test_a_look_up_leaves_no_mark_on_a_copy(of_dynamo: bool) -> None:
    """AOTAutograd would take a copy of Dynamo's graph for the original afterwards."""
    gm = fx.symbolic_trace(nn.Linear(2, 2))
    if of_dynamo:
        gm._param_name_to_source = {}

    def look_up(gm: fx.GraphModule, *_: object, **__: object) -> None:
        with autograd_cache.sanitize_gm_for_cache(gm):
            pass

    how = mock.Mock()
    with mock.patch.object(warm_start, "compile_inner", look_up):
        warm_start.Compilation.compile(how, gm, [], keep=False)
    assert hasattr(gm, "_param_name_to_source") == of_dynamo
