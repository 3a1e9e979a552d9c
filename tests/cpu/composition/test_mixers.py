"""Mixers that are no attention, in tensor-parallel models and under FSDP2."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.cpu.against_one_process import run
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import check, deviations

WIDTH, HEADS, HEAD_DIM = 32, 8, 4


class Layer(nn.Module):
    """Linear attention by a cumulative sum, and then attention by softmax."""

    def __init__(self) -> None:
        super().__init__()
        for name in "qkv":
            setattr(self, f"w{name}", nn.Linear(WIDTH, WIDTH))
        self.mixed, self.attended = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, HEAD_DIM)) for w in (self.wq, self.wk, self.wv)
        )
        states = torch.cumsum(F.elu(k).add(1).unsqueeze(-1) * v.unsqueeze(-2), 1)
        y = (q.unsqueeze(-1) * states).sum(-2) / HEAD_DIM
        x = x + self.mixed(y.flatten(2)) / x.shape[1]
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.attended(y.transpose(1, 2).flatten(2))


def in_parallel(model: nn.Module, mesh) -> nn.Module:
    """Heads are sharded over tp."""
    plan = {}
    for i in range(len(model)):  # type: ignore[arg-type]  # an nn.Sequential
        plan |= {f"{i}.w{name}": ColwiseParallel() for name in "qkv"}
        plan |= {f"{i}.{name}": RowwiseParallel() for name in ("mixed", "attended")}
    return parallelize_module(model, mesh, plan)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("tokens", [16, 18, 37])
@pytest.mark.parametrize("mixers", ["exchange", "auto"])
@pytest.mark.parametrize(
    ("how", "shape"), [("tp", (2, 2)), ("fsdp", (2, 1)), ("fsdp", (2, 2))]
)
@on_ranks(lambda shape: shape[0] * shape[1], timeout=180)
def test_it_equals_one_process(how, shape, mixers, tokens):
    counters.clear()
    alone = nn.Sequential(Layer(), Layer()).double()
    x = torch.randn(2, tokens, WIDTH, dtype=torch.float64)
    wanted = run(alone, x.clone().requires_grad_(), alone)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("cp", "tp"))
    model = copy.deepcopy(alone)
    if shape[1] > 1:
        model = in_parallel(model, mesh["tp"])
    options = {"mesh": mesh, "inner": "aot_eager", "strategy": mixers}
    if "fsdp" in how:  # each layer is compiled by itself, as FSDP2's hooks ask for
        axes = mesh["cp"] if shape[1] > 1 else mesh._flatten("all")
        for layer in model:  # type: ignore[attr-defined]
            layer.compile(backend="cp", options=options | {"shard": {"x": 1}})
            fully_shard(layer, mesh=axes)
        fully_shard(model, mesh=axes)
        call = model
    else:
        call = torch.compile(model, backend="cp", options=options)
    got = run(call, x.clone().requires_grad_(), model)
    check(deviations(got, wanted))
    # One program serves both blocks of FSDP2.
    assert counters["cpcompile"]["exchange_mixers"] or mixers == "auto"
