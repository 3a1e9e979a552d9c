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
from tests.cpu.attention_cases import compiled_on, sequence_mesh
from tests.cpu.on_ranks import on_ranks
from tests.cpu.programs import Base, Breaks
from tests.support.bounds import (
    Values,
    check,
    deviations,
    in_one_process,
    step,
)


def reference(model: nn.Module, tokens: Tensor) -> tuple[Values, Values]:
    return in_one_process(lambda alone: step(alone, alone, tokens), model)


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=["batch", "whole"])
@on_ranks(4)
def test_a_mesh_with_two_axes(placement):
    """Batch on one mesh axis, sequence on the other, DTensor inputs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model, tokens = Base(), torch.randint(0, 50, (2, 16))
    values = reference(model, tokens)
    compiled = torch.compile(model, backend="cp", options={"inner": "aot_eager"})
    given = distribute_tensor(tokens, mesh, [placement, Shard(1)])
    check(deviations(step(compiled, model, given), *values))


@on_ranks(2)
def test_gradients_may_stay_local():
    """grad_sync="none": the sum over ranks of what stays local is the gradient."""
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
    mesh, model, tokens = sequence_mesh(2), Base(), torch.randint(0, 50, (2, 17))
    values = reference(model, tokens)
    model = distribute_module(model, mesh)
    options = {"inner": "aot_eager", "grad_sync": "none"}
    compiled = torch.compile(model, backend="cp", options=options)
    got = step(compiled, model, cp.shard(tokens, mesh, 1))
    placements = {str(p.grad.placements) for p in model.parameters()}
    check(deviations(got, *values))
    assert placements == {"(Partial(sum),)"}


@on_ranks(2)
def test_a_mode_and_explain_twice():
    model, tokens = Base(), torch.randint(0, 50, (2, 16))
    compiled = torch.compile(model, backend="cp", mode="default")
    given = cp.shard(tokens, sequence_mesh(2), 1)
    compiled(given)
    first, second = cp.explain(compiled, given), cp.explain(compiled, given)
    assert str(first) == str(second)
    assert [call.query[2] for call in first.calls] == [16]
    assert len(first.graphs) == 1
