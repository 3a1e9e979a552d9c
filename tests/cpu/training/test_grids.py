"""Attention within windows and along axes of an image, in float64."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from cpcompile.accounting.graph_account import Kind
from tests.cpu.against_one_process import compare, run
from tests.cpu.attention_cases import compiled_on
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import check, deviations
from tests.support.grids import MODULES, WIDTH, Attention, Windows
from tests.support.profiled_messages import Messages

CASES = [
    (name, world, batch, door)
    for name in MODULES
    for world, batch in ((2, 1), (2, 2), (3, 1))
    for door in ("plain", "dtensor")
    if (name, door) != ("one step", "dtensor")  # DTensor has no rule for that view
]


@pytest.mark.parametrize(("name", "world", "batch", "door"), CASES)
@on_ranks("world")
def test_it_equals_one_process(name, world, batch, door):
    make, tokens = MODULES[name]
    options = {} if door == "dtensor" else {"shard": {"x": 1}}
    compare(make, (batch, tokens, WIDTH), world, door, **options).check()


@on_ranks(4)
def test_windows_of_samples_on_another_axis():
    """They are exchanged for columns of windows: the samples are shared out already."""
    alone = Windows(rows=12).double()
    model = copy.deepcopy(alone)
    x = torch.randn(4, 96, WIDTH, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    compiled = compiled_on(mesh, model, axis="cp")
    given = distribute_tensor(x, mesh, [Shard(0), Shard(1)]).requires_grad_()
    wanted = run(alone, x.clone().requires_grad_(), alone)
    check(deviations(run(compiled, given, model), wanted))


class ChannelsFirst(nn.Module):
    """A linear layer on rows of a grid that a convolution has made."""

    def __init__(self):
        super().__init__()
        self.before, self.attention = nn.Conv2d(WIDTH, WIDTH, 1), Attention()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.attention(x).mT.unflatten(2, (8, 6))
        y = self.linear(self.before(y).permute(0, 2, 3, 1))
        return y.sin().square().mean()


@pytest.mark.parametrize("frozen", [True, False])
@on_ranks(2)
def test_a_layer_whose_weights_require_no_gradient(frozen):
    """torch multiplies each row by weights that require none, not all rows at once."""
    model, x = ChannelsFirst().double(), torch.randn(2, 48, WIDTH, dtype=torch.float64)
    compiled = compiled_on(2, model, shard={"x": 1})
    if frozen:
        model.linear.requires_grad_(False)
    with torch.set_grad_enabled(frozen):
        wanted, _ = model(x), compiled(x)
        with Messages(2, torch.distributed.get_rank()) as messages:
            got = compiled(x)
    found = {"loss": got.detach()}, {"loss": wanted.detach()}
    found = deviations(*found)
    gathered = messages.sizes[Kind.ALL_GATHER]
    check(found)
    assert gathered == 0
