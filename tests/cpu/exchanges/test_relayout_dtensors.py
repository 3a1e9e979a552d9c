"""cp::relayout on DTensors and in compiled programs, between what may be fused."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile.geometry.layout import Layout
from tests.support.bounds import assert_close
from tests.support.whole_sequences import normal, permuted

relayout = torch.ops.cp.relayout
BACKENDS = ["aot_eager", "inductor"]


def there_and_back(x, w, length, group):
    """Something to fuse before, between and after."""
    y = relayout(x.sin() * w, 1, length, "contiguous", "zigzag", group)
    z = relayout(y.cos(), 1, length, "zigzag", "fold", group)
    return y, z * 2


def run_there_and_back(mesh, placements, shape, backend, plain=False):
    """`there_and_back` and its gradients, against the same on whole tensors.

    On DTensors with these placements, or on their local tensors if `plain`.
    """
    sequence = mesh.ndim - 1  # the axis of the group
    length, ranks = shape[1], mesh.size(sequence)
    whole, weight, *grads = (normal(shape, seed=seed) for seed in range(4))
    moved = (*placements[:-1], Shard(1))

    def give(x, layout, placements=moved):
        x = permuted(x, 1, layout, ranks)
        given = distribute_tensor(x, mesh, placements, src_data_rank=None)
        return given.to_local() if plain else given

    def take(x):
        if not plain:
            return x.full_tensor()
        strides = whole.stride()
        like = {"run_check": False, "shape": whole.shape, "stride": strides}
        return DTensor.from_local(x, mesh, moved, **like).full_tensor()

    step = there_and_back
    if backend is not None:
        step = torch.compile(there_and_back, backend=backend, fullgraph=True)
    x, w = (give(t, Layout.CONTIGUOUS, placements) for t in (whole, weight))
    x.requires_grad_()
    # The cache of torch 2.13 takes uneven DTensors of other ranks for equal.
    with functorch_config.patch(enable_autograd_cache=False):
        results = step(x, w, length, mesh.get_group(sequence).group_name)
    assert plain or all(r.placements == moved for r in results)
    layouts = Layout.ZIGZAG, Layout.FOLD
    given = [give(g, each) for g, each in zip(grads, layouts, strict=True)]
    (grad,) = torch.autograd.grad(results, x, given)

    leaf = whole.clone().requires_grad_()
    first = leaf.sin() * weight
    outs = first, first.cos() * 2
    for result, out, each in zip(results, outs, layouts, strict=True):
        assert_close(each.value, take(result), permuted(out, 1, each, ranks))
    assert_close("grad", take(grad), *torch.autograd.grad(outs, leaf, grads))


@functools.cache
def mesh_of(*sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp")[-len(sizes) :])


def on_a_line(placement, length, *how):
    mesh = mesh_of(dist.get_world_size())
    run_there_and_back(mesh, (placement,), (3, length, 4), *how)


@pytest.mark.parametrize("placement", [Shard(1), Shard(2), Replicate()], ids=str)
@pytest.mark.parametrize("length", [16, 17])
def test_dtensors(pools, placement, length):
    pools[3].run(on_a_line, placement, length, None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(("world", "length"), [(2, 16), (3, 17)])
def test_compiled(pools, backend, plain, world, length):
    pools[world].run(on_a_line, Shard(1), length, backend, plain, timeout=120)


def on_a_square(other, backend):
    run_there_and_back(mesh_of(2, 2), (other, Shard(1)), (3, 17, 4), backend)


@pytest.mark.parametrize("other", [Replicate(), Shard(0), Shard(2)], ids=str)
def test_two_mesh_axes(pools, other):
    pools[4].run(on_a_square, other, None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_on_two_mesh_axes(pools, backend):
    pools[4].run(on_a_square, Shard(0), backend, timeout=120)
