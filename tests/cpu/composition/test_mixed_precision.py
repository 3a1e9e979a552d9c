"""Low precision with context parallelism is as good as without, against float64."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.cpu.composition.training import (
    batches,
    local_rows,
    new_gpt,
    relative_error,
    rounded_gradients,
)

TOKENS = 64
WORSE = 1.5  # the error with cp may be so many times that of the same run without
BF16 = torch.bfloat16


def run(how: str, inner: str) -> tuple[float, float]:
    """Relative errors of all gradients, with cp and without."""
    torch._dynamo.reset()
    ranks = dist.get_world_size()
    shape = (ranks // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
    exact = rounded_gradients(new_gpt(), *next(batches(TOKENS)))
    step = fsdp if how == "policy" else whole_model
    options = {"mesh": mesh, "inner": inner}
    found = (step(how, mesh, each) for each in (options, None))
    with_cp, without = (relative_error(x, exact) for x in found)
    return with_cp, without


def whole_model(
    how: str, mesh: DeviceMesh, options: dict[str, object] | None
) -> dict[str, Tensor]:
    model = new_gpt().to(BF16 if how == "parameters" else torch.float32)
    if options is not None:
        model.compile(backend="cp", options=options)
    autocast = torch.autocast("cpu", BF16) if how == "autocast" else nullcontext()
    with autocast:
        return rounded_gradients(model, *next(batches(TOKENS)))


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
@pytest.mark.parametrize("how", ["autocast", "parameters", "policy"])
def test_errors_are_those_without_context_parallelism(pools, how, inner) -> None:
    ranks = 4 if how == "policy" else 2
    for with_cp, without in pools[ranks].run(run, how, inner, timeout=150):
        assert 0 < with_cp <= WORSE * without, (with_cp, without)
