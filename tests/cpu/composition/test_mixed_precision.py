"""Low precision with context parallelism is as good as without, against float64."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import cpcompile as cp
from tests.cpu.composition.training import (
    batches,
    local_rows,
    new_gpt,
    relative_error,
    rounded_gradients,
)
from tests.cpu.on_ranks import on_ranks

TOKENS = 64
WORSE = 1.5  # the error with cp may be so many times that of the same run without
BF16 = torch.bfloat16


def whole_model(
    how: str, mesh: DeviceMesh, options: dict[str, object] | None
) -> dict[str, Tensor]:
    model = new_gpt().to(BF16 if how == "parameters" else torch.float32)
    if options is not None:
        model.compile(backend="cp", options=options)
    autocast = torch.autocast("cpu", BF16) if how == "autocast" else nullcontext()
    with autocast:
        return rounded_gradients(model, *next(batches(TOKENS)))


def sharded(
    how: str, mesh: DeviceMesh, options: dict[str, object] | None
) -> dict[str, Tensor]:
    """Parameters that are gathered in bfloat16."""
    if options is None:
        return whole_model("parameters", mesh, None)
    model = new_gpt().float()
    cp.shard_parameters(model, mesh, param_dtype=BF16, reduce_dtype=torch.float32)
    model.compile(backend="cp", options=options)
    gradients = rounded_gradients(model, *next(batches(TOKENS)))
    assert all(x.dtype == torch.float32 for x in gradients.values())
    return gradients


def fsdp(
    how: str, mesh: DeviceMesh, options: dict[str, object] | None
) -> dict[str, Tensor]:
    """FSDP2 over all ranks; without cp each of them has other rows."""
    model = new_gpt().float()
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    everyone = mesh["dp", "cp"]._flatten("dp_cp")
    for block in model.layers:
        fully_shard(block, mesh=everyone, mp_policy=policy)
        if options is not None:
            block.compile(backend="cp", options=options)
    fully_shard(model, mesh=everyone, mp_policy=policy)
    rows = everyone if options is None else mesh["dp"]
    batch = next(batches(TOKENS))
    return rounded_gradients(model, *(local_rows(x, rows.get_group()) for x in batch))


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("how", ["autocast", "parameters", "policy", "sharded"])
@on_ranks(lambda how: 4 if how == "policy" else 2)
def test_errors_are_those_without_context_parallelism(how, inner) -> None:
    """Of all gradients, relative ones."""
    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
    exact = rounded_gradients(new_gpt(), *next(batches(TOKENS)))
    step = {"policy": fsdp, "sharded": sharded}.get(how, whole_model)
    options = {"mesh": mesh, "inner": inner}
    found = (step(how, mesh, each) for each in (options, None))
    with_cp, without = (relative_error(x, exact) for x in found)
    assert 0 < with_cp <= WORSE * without, (with_cp, without)
