"""What is checked and remembered of a call, and what wrappers expect of gradients."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import DeviceMesh

from cpcompile import config
from cpcompile.errors import InputError
from cpcompile.frontend.reducers import Reducer, settled
from cpcompile.options import GradSync
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


def test_what_is_remembered():
    # As a graph break leaves it; there is nothing to share out.

    def step(x):
        y = torch.relu(x)
        length = y.shape[1]
        torch._dynamo.graph_break()
        return y, 2 * length + 1

    with fake_mesh(2) as mesh:
        options = {"mesh": mesh, "inner": "aot_eager"}
        call = torch.compile(step, backend="cp", dynamic=True, options=options)
        assert [call(torch.randn(2, n))[1] for n in (8, 12, 10)] == [17, 25, 21]
    # A name of an earlier graph of the function may be absent.
    with fake_group() as _:
        mesh = DeviceMesh("cpu", torch.arange(4), mesh_dim_names=("cp",))
        shard = {"x": 2, "labels": 1}
        options = {"mesh": mesh, "inner": "aot_eager", "shard": shard}
        x, labels = torch.ones(1, 2, 8, 4), torch.ones(1, 8)
        step = torch.compile(by_name, backend="cp", options=options)
        assert "names 'labels', and no argument" in message(lambda: step(x=x))
        step(x=x, labels=labels)
        step(x=x)


def mesh_of(*ranks: int) -> SimpleNamespace:
    return SimpleNamespace(mesh=torch.tensor(ranks))


def reducer(*ranks: int, mean: bool = True) -> Reducer:
    return Reducer("FSDP2", frozenset(ranks), mean)


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        (None, GradSync.REDUCE),
        (reducer(0, 1, 2, 3), GradSync.AVERAGE),
        (reducer(0, 1), GradSync.AVERAGE),
        (reducer(0, 1, 2, 3, mean=False), GradSync.NONE),
        (reducer(0, 2), GradSync.REDUCE),
        (reducer(0), GradSync.REDUCE),
    ],
)
def test_what_a_wrapper_expects(by, expected) -> None:
    """Without one, names count."""
    assert settled(None, by, mesh_of(0, 1)) is expected
    assert settled(expected, by, mesh_of(0, 1)) is expected
    for asked in GradSync:
        assert settled(asked, None, mesh_of(0, 1)) is asked


@pytest.mark.parametrize("asked", [None, *GradSync])
def test_a_wrapper_over_a_part_of_the_axis(asked) -> None:
    with pytest.raises(InputError) as raised:
        settled(asked, reducer(0, 1), mesh_of(0, 1, 2, 3))
    assert str(raised.value) == (
        "parameters are managed by FSDP2, which averages over the ranks [0, 1], and "
        "the sequence is sharded over the ranks [0, 1, 2, 3]; needed all of these "
        'among the former, or only one: wrap over mesh["dp"], or over both axes: '
        'mesh["dp", "cp"]._flatten("dp_cp")'
    )


@pytest.mark.parametrize(
    ("asked", "by", "needed"),
    [
        ("none", reducer(0, 1), "average"),
        ("average", reducer(0, 1, mean=False), "none"),
        ("reduce", reducer(0, 1, mean=False), "none"),
        ("average", reducer(0, 2), "reduce"),
        ("none", reducer(0), "reduce"),
    ],
)
def test_names_that_contradict(asked, by, needed) -> None:
    with pytest.raises(InputError, match=f"{asked!r}.*needed {needed!r}"):
        settled(GradSync(asked), by, mesh_of(0, 1))
