"""What a program writes into its arguments, the caller sees, on every rank."""

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import cpcompile as cp
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import check, deviations, gradients


class Writes(nn.Module):
    """It counts calls per token in an argument, and scales a part of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x, seen):
        seen += 1
        x[:, 1:].mul_(2.0)
        q = self.linear(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return sdpa(q, q, q, is_causal=True).square().sum()


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("door", "tokens", "world", "layout"),
    [
        ("plain", 17, 3, "contiguous"),
        ("plain", 16, 2, "zigzag"),
        ("dtensor", 17, 3, "contiguous"),
        ("dtensor", 16, 2, "zigzag"),
        ("dtensor, given", 16, 2, "zigzag"),
    ],
)
@on_ranks("world")
def test_the_caller_sees_it(door, tokens, world, layout, inner):
    torch._dynamo.reset()
    model = Writes()
    x, seen = torch.randn(2, tokens, 8, dtype=torch.float64), torch.arange(tokens)[None]
    written, counts = x.clone(), seen.clone()
    loss = model(written, counts)
    exact = {"x": written, "loss": loss.detach()} | gradients(loss, model)
    model.zero_grad()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    options = {"strategy": "ring", "layout": layout, "inner": inner}
    given = "contiguous" if "given" not in door else layout
    if door == "plain":
        options |= {"mesh": mesh, "shard": {"x": 1, "seen": 1}}
    else:
        x, seen = (cp.shard(t, mesh, 1, layout=given) for t in (x, seen))
    loss = torch.compile(model, backend="cp", options=options)(x, seen)
    if isinstance(loss, DTensor):
        loss = loss.full_tensor()
        x, seen = (cp.unshard(t) for t in (x, seen))
    assert torch.equal(seen, counts)
    got = {"x": x, "loss": loss.detach()} | gradients(loss, model)
    check(deviations(got, exact))
