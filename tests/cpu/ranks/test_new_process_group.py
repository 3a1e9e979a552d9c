"""A process group that is destroyed and made anew is another one, for every cache."""

import datetime

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store

import cpcompile as cp
from tests.cpu.one_call import Model, tokens


def error_of_a_step(mesh: DeviceMesh, door: str, step=None) -> float:
    """Of the loss and the gradient against one process."""
    torch.manual_seed(0)
    model = Model()
    wanted = model(tokens())
    options = {"inner": "aot_eager"}
    given = tokens()
    if door == "dtensor":
        given = cp.shard(given, mesh, 1)
    else:
        options["mesh"] = mesh
    loss = torch.compile(model, backend="cp", options=options)(given)
    if door == "dtensor":
        loss = loss.full_tensor()
    grads = [torch.autograd.grad(x, model.embedding.weight)[0] for x in (loss, wanted)]
    return max(abs(loss - wanted).item(), (grads[0] - grads[1]).abs().max().item())


def groups_in_turn(door: str) -> list[float]:
    """A group of all ranks is made, used and destroyed, three times."""
    errors = []
    for _ in range(3):
        torch._dynamo.reset()
        group = dist.new_group(timeout=datetime.timedelta(seconds=20))
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
        errors.append(error_of_a_step(mesh, door))
        dist.destroy_process_group(group)
    return errors


@pytest.mark.core("dtensor")
@pytest.mark.parametrize("door", ["plain", "dtensor"])
def test_a_group_that_is_made_anew(pools, door):
    for errors in pools[2].run(groups_in_turn, door):
        assert max(errors) < 1e-6


def a_group_between(door: str) -> list[float]:
    """One group is used again after another of the same ranks came and went."""
    torch._dynamo.reset()
    first = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    errors = [error_of_a_step(first, door)]
    errors += groups_in_turn(door)
    torch._dynamo.reset()
    return [*errors, error_of_a_step(first, door)]


@pytest.mark.core("plain")
@pytest.mark.parametrize("door", ["plain", "dtensor"])
def test_a_group_that_is_used_again(pools, door):
    for errors in pools[2].run(a_group_between, door):
        assert max(errors) < 1e-6


def everything_anew(reset: bool) -> list[float]:
    """Also the default group, on the same store, with or without a new compilation."""
    torch.manual_seed(0)
    model = Model()
    wanted = model(tokens()).item()
    ranks, errors = (dist.get_rank(), dist.get_world_size()), []
    step, store = None, _get_default_store()
    for number in range(2):
        if step is None or reset:
            torch._dynamo.reset()
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
            options = {"mesh": mesh, "inner": "aot_eager"}
            step = torch.compile(model, backend="cp", options=options)
        loss = step(tokens())
        loss.backward()
        errors.append(abs(loss.item() - wanted))
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"{number}", store),
            rank=ranks[0],
            world_size=ranks[1],
        )
    return errors


@pytest.mark.core("True")
@pytest.mark.parametrize("reset", [True, False])
def test_a_default_group_that_is_made_anew(pools, reset):
    for errors in pools[2].run(everything_anew, reset):
        assert max(errors) < 1e-6
    pools[2].close()  # what tests remember belongs to another group
