"""cp::relayout on DTensors and in compiled programs, between what may be fused."""

import pytest
import torch
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile.geometry.layout import Layout
from tests.cpu.on_ranks import on_ranks
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


CASES = [
    *(("line", x, n, 3, None, False) for x in (Shard(1), Shard(2), Replicate())
      for n in (16, 17)),
    *(("line", Shard(1), n, world, backend, plain) for world, n in ((2, 16), (3, 17))
      for plain in (True, False) for backend in BACKENDS),
    *(("square", x, 17, 4, None, False) for x in (Replicate(), Shard(0), Shard(2))),
    *(("square", Shard(0), 17, 4, backend, False) for backend in BACKENDS),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mesh", "placement", "length", "world", "backend", "plain"), CASES, ids=str
)
@on_ranks("world")
def test_there_and_back(mesh, placement, length, world, backend, plain):
    """On one mesh axis, where `placement` is the input's, or beside another one."""
    sizes, placements = (world,), (placement,)
    if mesh == "square":
        sizes, placements = (2, 2), (placement, Shard(1))
    names = ("dp", "cp")[-len(sizes) :]
    of_ranks = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    run_there_and_back(of_ranks, placements, (3, length, 4), backend, plain)
