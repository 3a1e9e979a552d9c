"""A process group that is destroyed and made anew is another one, for every cache."""

import datetime

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store

import cpcompile as cp
from tests.cpu.attention_cases import compiled_on
from tests.cpu.on_ranks import on_ranks
from tests.cpu.one_call import Model, tokens
from tests.support.bounds import (
    Deviation,
    check,
    deviations,
    in_one_process,
    step,
)


def deviations_of_a_step(mesh: DeviceMesh, door: str) -> list[Deviation]:
    """Of the loss and the gradient against one process."""
    torch.manual_seed(0)
    model = Model().double()
    values = in_one_process(lambda alone: step(alone, alone, tokens()), model)
    options = {"inner": "aot_eager"}
    given = tokens()
    if door == "dtensor":
        given = cp.shard(given, mesh, 1)
    else:
        options["mesh"] = mesh
    compiled = torch.compile(model, backend="cp", options=options)
    return deviations(step(compiled, model, given), *values)


def groups_in_turn(door: str) -> list[Deviation]:
    """A group of all ranks is made, used and destroyed, three times."""
    found = []
    for _ in range(3):
        torch._dynamo.reset()
        group = dist.new_group(timeout=datetime.timedelta(seconds=20))
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
        found += deviations_of_a_step(mesh, door)
        dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize("door", ["plain", "dtensor"])
@on_ranks(2)
def test_a_group_that_is_used_again(door):
    """After another of the same ranks came and went."""
    first = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    found = deviations_of_a_step(first, door) + groups_in_turn(door)
    torch._dynamo.reset()
    check(found + deviations_of_a_step(first, door))


def everything_anew(reset: bool) -> list[Deviation]:
    """Also the default group, on the same store, with or without a new compilation."""
    torch.manual_seed(0)
    model = Model().double()
    values = in_one_process(lambda alone: step(alone, alone, tokens()), model)
    ranks, found = (dist.get_rank(), dist.get_world_size()), []
    compiled, store = None, _get_default_store()
    for number in range(2):
        if compiled is None or reset:
            torch._dynamo.reset()
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
            compiled = compiled_on(mesh, model)
        found += deviations(step(compiled, model, tokens()), *values)
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"{number}", store),
            rank=ranks[0],
            world_size=ranks[1],
        )
    return found


@pytest.mark.parametrize("reset", [True, False])
def test_a_default_group_that_is_made_anew(pools, reset):
    for found in pools[2].run(everything_anew, reset):
        check(found)
    pools[2].close()  # what tests remember belongs to another group
