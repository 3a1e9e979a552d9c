"""Ways to call a compiled program: meshes, modes, lengths, without gradients."""

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)

import cpcompile as cp
from tests.cpu.against_one_process import compare_calls
from tests.cpu.attention_cases import compiled_on, sequence_mesh
from tests.cpu.on_ranks import on_ranks
from tests.cpu.programs import Base, Breaks
from tests.support.bounds import (
    Deviation,
    Values,
    check,
    deviations,
    in_one_process,
    step,
)


def reference(model: nn.Module, tokens: Tensor) -> tuple[Values, Values]:
    """Loss and gradients, exact and rough."""
    return in_one_process(lambda alone: step(alone, alone, tokens), model)


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=["batch", "whole"])
@on_ranks(4)
def test_a_mesh_with_two_axes(placement):
    """Batch on one mesh axis, sequence on the other, DTensor inputs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model, tokens = Base(), torch.randint(0, 50, (2, 16))
    values = reference(model, tokens)
    compiled = torch.compile(model, backend="cp", options={"inner": "aot_eager"})
    given = distribute_tensor(tokens, mesh, [placement, Shard(1)])
    check(deviations(step(compiled, model, given), *values))


@on_ranks(2)
def test_gradients_may_stay_local():
    """grad_sync="none": the sum over ranks of what stays local is the gradient."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, tokens = Breaks(), torch.randint(0, 50, (2, 16))
    values = reference(model, tokens)
    compiled = compiled_on(2, model, shard={"tokens": 1}, grad_sync="none")
    got = step(compiled, model, tokens)
    for name, x in got.items():
        if name != "loss":
            torch.distributed.all_reduce(x)
    check(deviations(got, *values))


@on_ranks(2)
def test_gradients_of_distributed_parameters_may_stay_partial():
    """grad_sync="none" with distributed parameters: their gradients are Partial."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh, model, tokens = sequence_mesh(2), Base(), torch.randint(0, 50, (2, 17))
    values = reference(model, tokens)
    model = distribute_module(model, mesh)
    options = {"inner": "aot_eager", "grad_sync": "none"}
    compiled = torch.compile(model, backend="cp", options=options)
    got = step(compiled, model, cp.shard(tokens, mesh, 1))
    placements = {str(p.grad.placements) for p in model.parameters()}
    check(deviations(got, *values))
    assert placements == {"(Partial(sum),)"}


def loss_alone(model: nn.Module, tokens: Tensor) -> tuple[Values, Values]:
    """The loss, exact and rough."""
    return in_one_process(lambda alone: {"loss": alone(tokens).detach()}, model)


def run_inference() -> list[Deviation]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Base().eval()
    tokens = torch.randint(0, 50, (2, 17))
    compiled = compiled_on(2, model, shard={"tokens": 1})
    values = loss_alone(model, tokens)
    with torch.no_grad():
        found = deviations({"loss": compiled(tokens)}, *values)
    with torch.inference_mode():
        return found + deviations({"loss": compiled(tokens)}, *values)


@on_ranks(2)
def test_inference():
    check(run_inference())


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("door", ["plain", "dtensor"])
@on_ranks(2)
def test_lengths_may_change(door, dynamic):
    """One compiled model, called with several lengths."""
    calls = [(torch.randint(0, 50, (2, seq)),) for seq in (16, 24, 17, 16)]
    named = {"shard": {"tokens": 1}} if door == "plain" else {}
    model = Base().double()
    compare_calls(model, calls, 2, door, dynamic=dynamic, **named).check()


@on_ranks(2)
def test_a_mode_and_explain_twice():
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = sequence_mesh(2)
    model = Base()
    tokens = torch.randint(0, 50, (2, 16))
    compiled = torch.compile(model, backend="cp", mode="default")
    given = cp.shard(tokens, mesh, 1)
    found = deviations({"loss": compiled(given)}, *loss_alone(model, tokens))
    first, second = cp.explain(compiled, given), cp.explain(compiled, given)
    assert str(first) == str(second)
    (call,) = first.calls
    length = call.query[2]
    graphs = len(first.graphs)
    check(found)
    assert length == 16 and graphs == 1
