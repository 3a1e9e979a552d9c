"""Rules, handlers, plans and gradients of DTensor that cpcompile fixes on import."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _redistribute

import cpcompile.backend  # noqa: F401  fixes them
from cpcompile.passes.graph.constant_arguments import MeshAxis
from cpcompile.passes.whole.leave_for_later import cp_unreduced
from cpcompile.torch_patches import shard_placements
from tests.golden.capture import fake_mesh
from tests.support.bounds import assert_close, assert_equal

MESH_AXES = {"cp": 2}


def test_every_call_has_its_own_shape(mesh):
    x = DTensor.from_local(torch.randn(4, 8), mesh, [Shard(0)], run_check=False)
    for k in (2, 1, 3):
        assert [tuple(y.shape) for y in x.topk(k)] == [(8, k)] * 2
    few = DTensor.from_local(torch.zeros(3, 8).long(), mesh, [Shard(0)])  # 6 rows of 8
    assert x.gather(1, few).placements == (Replicate(),)
    x = DTensor.from_local(torch.randn(8), mesh, [Replicate()], run_check=False)
    assert [x.histc(bins, -1, 1).shape[0] for bins in (4, 6)] == [4, 6]


@pytest.mark.parametrize("scan", [torch.cumsum, torch.cumprod, torch.logcumsumexp])
def test_a_scan_from_the_end_is_not_done_on_parts(mesh, scan):
    x = DTensor.from_local(torch.randn(2, 4, 8), mesh, [Shard(1)], run_check=False)
    assert scan(x, -2).placements == scan(x, 1).placements == (Replicate(),)
    assert scan(x, -1).placements == (Shard(1),)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("samples", [2, 3])
def test_group_norm_backward_of_samples_on_each_rank(mesh, samples, weighted):
    channels, rows, groups = 6, 5, 2
    sizes = (samples, channels, rows, groups)
    x = torch.randn(samples, channels, rows, dtype=torch.float64)
    grad = torch.randn_like(x)
    weight = torch.randn(channels, dtype=torch.float64) if weighted else None
    aten = torch.ops.aten
    _, *stats = aten.native_group_norm(x, weight, weight, *sizes, 1e-5)
    mask = [True, weighted, weighted]
    want = aten.native_group_norm_backward(grad, x, *stats, weight, *sizes, mask)

    def split(y):
        parts = dict(enumerate(y.tensor_split(2)))
        parts = {rank: part.clone() for rank, part in parts.items()}
        return DTensor.from_local(
            LocalTensor(parts), mesh, [Shard(0)], shape=y.shape, stride=y.stride()
        )

    with LocalTensorMode(2):
        whole = None
        if weight is not None:
            whole = DTensor.from_local(
                LocalTensor({0: weight, 1: weight}), mesh, [Replicate()]
            )
        got = aten.native_group_norm_backward(
            *map(split, (grad, x, *stats)), whole, *sizes, mask
        )
        assert got[0].placements == (Shard(0),)
        names = ("grad of x", "grad of weight", "grad of bias")
        for name, mine, one in zip(names, got, want, strict=True):
            if one is not None and one.numel():
                assert_close(name, mine.full_tensor().reconcile(), one)


@pytest.mark.parametrize(
    "function",
    [
        *(F.softplus, F.leaky_relu, F.elu, F.mish, F.hardswish, F.hardsigmoid),
        *(F.relu6, F.softshrink, F.hardshrink),
    ],
)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_backward_by_elements_needs_no_decomposition(
    mesh, function, placement, monkeypatch
):
    part, grad = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    want = torch.autograd.grad(function(part), part, grad)[0]
    x, g = (
        DTensor.from_local(y.detach(), mesh, [placement], run_check=False)
        for y in (part, grad)
    )
    y = function(x.requires_grad_())
    strategy = DTensor._op_dispatcher.sharding_propagator.decomp_strategy
    monkeypatch.setattr(strategy, "propagate_strategy", None)
    got = torch.autograd.grad(y, x, g)[0]
    assert got.placements == (placement,)
    assert torch.equal(got.to_local(), want)


@pytest.mark.parametrize("sizes", [[2, 8, 5], [2, 8, 1, 5], [2, 9, 5]])
@pytest.mark.parametrize("placement", [Shard(1), Replicate()])
def test_what_is_filled_has_the_parts_of_its_operand(mesh, sizes, placement):
    """Unless the sharded dimension is another one."""
    x = DTensor.from_local(torch.randn(2, 4, 3), mesh, [placement], run_check=False)
    whole = placement == Replicate() or sizes != [2, 8, 5]
    if placement == Replicate():
        sizes = [n // 2 if n == 8 else n for n in sizes]
    for y in (x.new_zeros(sizes), x.new_full(sizes, 3.0), x.new_ones(sizes)):
        assert list(y.shape) == sizes
        assert y.placements == ((Replicate(),) if whole else (placement,))
        assert y.to_local().shape[1] == (sizes[1] if whole else sizes[1] // 2)


def test_what_stays_on_its_rank(mesh):
    # Its gradient has entries for all words, but only of the tokens of this rank.
    x = DTensor.from_local(torch.randn(1, 4, 6), mesh, [Shard(1)], run_check=False)
    x.requires_grad_()
    index = torch.zeros(1, 4, 1, dtype=torch.int64)
    index = DTensor.from_local(index, mesh, [Shard(1)], run_check=False)
    picked = x.gather(2, index)
    (grad,) = torch.autograd.grad(picked.sum(), x)
    assert grad.placements == (Shard(1),) and grad.to_local().shape == (1, 4, 6)
    for dim, placement in ((-1, Shard(1)), (-2, Replicate())):  # along which is written
        written = x.scatter_reduce(dim, index, x, "amax", include_self=False)
        assert written.placements == (placement,)
    x, weight = torch.ones(4, 8, dtype=torch.int8), torch.ones(8, 6, dtype=torch.int8)
    rows = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
    everywhere = DTensor.from_local(weight, mesh, [Replicate()], run_check=False)
    product = torch._int_mm(rows, everywhere)
    assert product.placements == (Shard(0),) and product.dtype == torch.int32


@pytest.mark.parametrize("count", [2, torch.tensor([0, 1, 2, 3])])
@pytest.mark.parametrize("shift", [operator.rshift, operator.lshift])
def test_bits_are_shifted(mesh, shift, count):
    """DTensor returned the operand as it was."""
    x = torch.tensor([[89, 200, 3, 17]], dtype=torch.int32)
    given = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
    counts = count
    if isinstance(count, Tensor):
        counts = DTensor.from_local(count, mesh, [Replicate()], run_check=False)
    assert_equal("shifted", shift(given, counts).to_local(), shift(x, count))


@pytest.mark.parametrize("placement", [Replicate(), Shard(2)])
def test_gradients_of_a_convolution_of_frames_are_sums(placement):
    """Frames are sharded; the gradient comes whole, or by the rows of an image."""
    with fake_mesh(2) as mesh:
        video = DTensor.from_local(torch.ones(2, 2, 3, 4, 4), mesh, [Shard(1)])
        whole = [Replicate()]
        weight, bias = (
            DTensor.from_local(x, mesh, whole, run_check=False).requires_grad_()
            for x in (torch.ones(5, 3, 2, 2), torch.ones(5))
        )
        y = F.conv2d(video.flatten(0, 1), weight, bias, stride=2)
        assert y.shape == (8, 5, 2, 2)
        rows = 1 if placement == Shard(2) else 2
        local = torch.ones(8, 5, rows, 2)
        gradient = DTensor.from_local(local, mesh, [placement], run_check=False)
        grads = torch.autograd.grad(y, (weight, bias), gradient)
    assert [x.placements for x in grads] == [(Partial(),)] * 2


def test_equal_plans_are_made_once():
    shard_placements._kept.cache_clear()
    with fake_mesh(2, 2, names=("cp", "tp")) as mesh:
        specs = [
            DTensor.from_local(torch.ones(4, 4), mesh, x, run_check=False)._spec
            for x in ((Shard(0), Shard(1)), (Shard(0), Replicate()))
        ]
        right = _redistribute._gen_transform_infos_non_cached(*specs)
        with shard_placements.plans_are_kept():
            found = [
                _redistribute._gen_transform_infos_non_cached(*specs) for _ in range(3)
            ]
    assert found[0] == right
    assert found[1] is found[0] and found[2] is found[0]
    assert shard_placements._kept.cache_info().misses == 1


MESH_AXES = {"cp": 2}


class FirstAlone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def test_a_result_without_a_gradient(mesh):
    x, y = (torch.ones(4, requires_grad=True) for _ in range(2))
    parts = [DTensor.from_local(t, mesh, [Shard(0)]) for t in (x, y)]
    FirstAlone.apply(*(p.full_tensor() for p in parts)).sum().backward()
    assert x.grad is not None and y.grad is None
    x, y = (torch.ones(4, requires_grad=True) for _ in range(2))
    whole = (Replicate(),)
    second = cp_unreduced(y, MeshAxis(mesh, 0))
    FirstAlone.apply(DTensor.from_local(x, mesh, whole), second).sum().backward()
    assert x.grad is not None and y.grad is None
