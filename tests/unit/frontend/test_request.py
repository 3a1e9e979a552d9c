"""What is checked before the ranks compare anything, and what is remembered of it."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import DeviceMesh

from cpcompile import config
from tests.golden.capture import fake_group, fake_mesh


def attention(x, labels=None):
    y = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    return y if labels is None else (y, labels)


def message(step, *args):
    with pytest.raises(BackendCompilerFailed) as caught:
        step(*args)
    return str(caught.value).split("\n\n")[0]


def compiled(mesh, **options):
    options = {"mesh": mesh, "inner": "aot_eager"} | options
    return torch.compile(attention, backend="cp", options=options)


def test_a_mesh_of_gpus_without_a_gpu(one_rank, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda", mesh_dim_names=("cp",))
    assert message(compiled(mesh), torch.ones(1, 2, 8, 4)) == (
        "backend='cp' raised:\nInputError: the mesh is of device type 'cuda', and "
        "torch sees no GPU here; needed a GPU per rank, or a mesh of device type 'cpu'"
    )


@pytest.mark.parametrize(
    ("name", "value"), [("hardware", 3), ("tie_fraction", "5 %"), ("step_kernel", "")]
)
def test_a_wrong_setting(one_rank, name, value):
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("cp",))
    with config.patch({name: value}):
        text = message(compiled(mesh), torch.ones(1, 2, 8, 4))
    assert f"OptionError: cpcompile.config.{name} is {value!r}; needed " in text


class Options(dict):
    """A dict that can be watched."""


def test_options_are_not_kept(one_rank):
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("cp",))
    options = Options(mesh=mesh, inner="aot_eager", shard={"x": 2})
    step = torch.compile(attention, backend="cp", options=options)
    step(torch.ones(1, 2, 8, 4))
    watched = weakref.ref(options)
    del step, options
    torch._dynamo.reset()
    gc.collect()
    assert watched() is None


def by_name(**tensors):
    return F.scaled_dot_product_attention(tensors["x"], tensors["x"], tensors["x"])


def test_an_argument_that_is_left_away_later():
    """A name of an earlier graph of the function may be absent."""
    with fake_group() as _:
        mesh = DeviceMesh("cpu", torch.arange(4), mesh_dim_names=("cp",))
        shard = {"x": 2, "labels": 1}
        options = {"mesh": mesh, "inner": "aot_eager", "shard": shard}
        x, labels = torch.ones(1, 2, 8, 4), torch.ones(1, 8)
        step = torch.compile(by_name, backend="cp", options=options)
        assert "names 'labels', and no argument" in message(lambda: step(x=x))
        step(x=x, labels=labels)
        step(x=x)


def test_a_graph_of_sizes_only():
    """As a graph break leaves it; there is nothing to share out."""

    def step(x):
        y = torch.relu(x)
        length = y.shape[1]
        torch._dynamo.graph_break()
        return y, 2 * length + 1

    with fake_mesh(2) as mesh:
        options = {"mesh": mesh, "inner": "aot_eager"}
        call = torch.compile(step, backend="cp", dynamic=True, options=options)
        assert [call(torch.randn(2, n))[1] for n in (8, 12, 10)] == [17, 25, 21]
