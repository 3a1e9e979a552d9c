"""Token chunks of tensor parallelism that a model returns, against one process."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from tests.cpu.on_ranks import on_ranks
from tests.golden.pipeline.test_tensor_parallel import TOKENS, WITH_EMBEDDING, Layer
from tests.support.bounds import check, deviations


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@on_ranks(4)
def test_they_are_those_of_one_process(layout):
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    model = nn.Sequential(nn.Embedding(16, 8), Layer()).double()
    alone, ids = copy.deepcopy(model), torch.randint(16, (2, 8))
    weights = torch.arange(8.0, dtype=torch.float64)
    whole = alone(ids)
    (whole * weights).square().sum().backward()
    exact = {n: p.grad for n, p in alone.named_parameters()}
    exact["result"] = whole.detach().chunk(2, 1)[mesh["tp"].get_local_rank()]
    plan = {f"1.{name}": style for name, style in TOKENS.items()}
    parallelize_module(model, mesh["tp"], plan | {"0": WITH_EMBEDDING["embedding"]})
    options = {"mesh": mesh, "strategy": "ring", "layout": layout}
    options |= {"inner": "aot_eager", "shard": {"input": 1}}
    result = torch.compile(model, backend="cp", options=options)(ids)
    (result * weights).square().sum().backward()
    got = {"result": result.detach()}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor):
            got[name] = grad.full_tensor()
        else:  # of this rank's chunk alone
            dist.all_reduce(grad, group=mesh["tp"].get_group())
            got[name] = grad
    check(deviations(got, exact))
