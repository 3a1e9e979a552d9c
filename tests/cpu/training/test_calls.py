"""Ways to call a compiled program: meshes, modes, lengths, without gradients."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)

import cpcompile as cp
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.programs import Base, Breaks, gradients, relative_error


def run_on_two_axes(placement) -> float:
    """Batch on one mesh axis, sequence on the other, DTensor inputs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = Base()
    tokens = torch.randint(0, 50, (2, 16))
    expected = model(tokens)
    wanted = gradients(expected, model)
    step = torch.compile(model, backend="cp", options={"inner": "aot_eager"})
    loss = step(distribute_tensor(tokens, mesh, [placement, Shard(1)]))
    got = gradients(loss, model)
    pairs = [(loss, expected), *zip(got, wanted, strict=True)]
    return max(relative_error(x, y) for x, y in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=["batch", "whole"])
def test_a_mesh_with_two_axes(pools, placement):
    for error in pools[4].run(run_on_two_axes, placement, timeout=90):
        assert error < 1e-5


def run_unreduced() -> list[float]:
    """grad_sync="none": the sum over ranks of what stays local is the gradient."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = sequence_mesh(2)
    model = Breaks()
    tokens = torch.randint(0, 50, (2, 16))
    wanted = gradients(model(tokens), model)
    options = {"mesh": mesh, "shard": {"tokens": 1}, "grad_sync": "none"}
    options |= {"inner": "aot_eager"}
    step = torch.compile(model, backend="cp", options=options)
    got = gradients(step(tokens), model)
    for grad in got:
        torch.distributed.all_reduce(grad)
    return [relative_error(x, y) for x, y in zip(got, wanted, strict=True)]


def test_gradients_may_stay_local(pools):
    for errors in pools[2].run(run_unreduced, timeout=90):
        assert max(errors) < 1e-5


def run_unreduced_parameters() -> tuple[list[float], set[str]]:
    """grad_sync="none" with distributed parameters: their gradients are Partial."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = sequence_mesh(2)
    model = Base()
    tokens = torch.randint(0, 50, (2, 17))
    wanted = gradients(model(tokens), model)
    model = distribute_module(model, mesh)
    options = {"inner": "aot_eager", "grad_sync": "none"}
    step = torch.compile(model, backend="cp", options=options)
    step(cp.shard(tokens, mesh, 1)).backward()
    got = [p.grad for p in model.parameters()]  # cloning one would reduce it
    errors = [relative_error(x, y) for x, y in zip(got, wanted, strict=True)]
    return errors, {str(x.placements) for x in got}


def test_gradients_of_distributed_parameters_may_stay_partial(pools):
    for errors, placements in pools[2].run(run_unreduced_parameters, timeout=60):
        assert max(errors) < 1e-5
        assert placements == {"(Partial(sum),)"}


def run_inference() -> float:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Base().eval()
    tokens = torch.randint(0, 50, (2, 17))
    options = {"mesh": sequence_mesh(2), "shard": {"tokens": 1}}
    step = torch.compile(model, backend="cp", options=options | {"inner": "aot_eager"})
    with torch.no_grad():
        first = relative_error(step(tokens), model(tokens))
    with torch.inference_mode():
        return max(first, relative_error(step(tokens), model(tokens)))


def test_inference(pools):
    assert max(pools[2].run(run_inference, timeout=90)) < 1e-5


def run_lengths(door: str, dynamic: bool | None) -> list[float]:
    """One compiled model, called with several lengths."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = sequence_mesh(2)
    model = Base()
    options = {"inner": "aot_eager"}
    if door == "plain":
        options |= {"mesh": mesh, "shard": {"tokens": 1}}
    step = torch.compile(model, backend="cp", options=options, dynamic=dynamic)
    errors = []
    for seq in (16, 24, 17, 16):
        tokens = torch.randint(0, 50, (2, seq))
        expected = model(tokens)
        wanted = gradients(expected, model)
        loss = step(tokens if door == "plain" else cp.shard(tokens, mesh, 1))
        pairs = [(loss, expected), *zip(gradients(loss, model), wanted, strict=True)]
        errors.append(max(relative_error(x, y) for x, y in pairs))
    return errors


@pytest.mark.core("plain-None")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("door", ["plain", "dtensor"])
def test_lengths_may_change(pools, door, dynamic):
    for errors in pools[2].run(run_lengths, door, dynamic, timeout=90):
        assert max(errors) < 1e-5


def run_mode_and_explain() -> tuple[float, int, int]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = sequence_mesh(2)
    model = Base()
    tokens = torch.randint(0, 50, (2, 16))
    step = torch.compile(model, backend="cp", mode="default")
    given = cp.shard(tokens, mesh, 1)
    error = relative_error(step(given), model(tokens))
    first, second = cp.explain(step, given), cp.explain(step, given)
    assert str(first) == str(second)
    (call,) = first.calls
    return error, call.query[2], len(first.graphs)


def test_a_mode_and_explain_twice(pools):
    for error, length, graphs in pools[2].run(run_mode_and_explain, timeout=100):
        assert error < 1e-5 and length == 16 and graphs == 1
