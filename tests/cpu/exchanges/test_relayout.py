"""cp::relayout on real ranks: values, gradients, and what is sent.

The reference is the definition: a sequence in a layout is x[permutation], cut as
torch.chunk cuts it. Nothing is computed, so results are equal, not close.
"""

import itertools

import pytest
import torch
import torch.distributed as dist

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile.geometry.layout import Chunks, Layout
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import assert_close
from tests.support.whole_sequences import normal, permuted

relayout = torch.ops.cp.relayout
PAIRS = list(itertools.product(Layout, repeat=2))
WORLDS = [2, 3, 4]
DTYPES = [torch.float64, torch.bfloat16, torch.int64, torch.bool]
DTYPES += [torch.complex64, torch.float8_e4m3fn]


def local(whole, dim, layout):
    """What this rank holds of it."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    chunks = Chunks(whole.shape[dim], ranks)
    chunk = chunks.start(rank), chunks.count(rank)
    return permuted(whole, dim, layout, ranks).narrow(dim, *chunk)


def move(x, dim, length, source, target):
    """The operator on all ranks."""
    group = dist.group.WORLD.group_name
    return relayout(x, dim, length, source.value, target.value, group)


def shape_of(length, dim, others=(3, 2)):
    return (*others[:dim], length, *others[dim:])


def same(x, y):
    """Whether dtype, shape and bytes are equal."""
    as_bytes = [t.contiguous().flatten().view(torch.uint8) for t in (x, y)]
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(*as_bytes)


def move_all(length, dim, dtype):
    whole = normal(shape_of(length, dim), dtype)
    for source, target in PAIRS:
        x = local(whole, dim, source)
        x = x.transpose(0, 1).contiguous().transpose(0, 1)  # any strides will do
        moved = move(x, dim, length, source, target)
        assert same(moved, local(whole, dim, target)), (source, target)
        assert moved.is_contiguous()
        back = move(moved, dim, length, target, source)
        assert same(back, x), (source, target)


def lengths(world):
    """Even, odd, barely above 2 N, N and around it, fewer tokens than ranks, none."""
    return [64, 67, 2 * world + 1, world + 1, world, world - 1, 1, 0]


@pytest.mark.parametrize(
    ("world", "length"), [(w, length) for w in WORLDS for length in lengths(w)]
)
@on_ranks("world")
def test_values(world, length):
    for dim in (0, 1, 2):
        move_all(length, dim, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(3)
def test_dtypes(dtype):
    move_all(67, 1, dtype)


@on_ranks(3)
def test_odd_shapes():
    """Token ids without another dimension, and tokens without elements."""
    for shape in ((67,), (67, 0), (0, 67)):
        dim = shape.index(67)
        whole = torch.arange(67).view(-1, 1).expand(67, 2)[:, 0]
        whole = whole if shape == (67,) else whole.new_empty(shape)
        for source, target in PAIRS:
            x = local(whole, dim, source)
            moved = move(x, dim - len(shape), 67, source, target)
            assert same(moved, local(whole, dim, target))


@on_ranks(2)
def test_conjugate_views():
    whole = normal((67, 2), torch.complex64)
    x = local(whole, 0, Layout.FOLD).conj()
    moved = move(x, 0, 67, Layout.FOLD, Layout.ZIGZAG)
    assert torch.equal(moved, local(whole, 0, Layout.ZIGZAG).conj())


@on_ranks(2)
def test_inference_mode_and_training():
    """What is remembered from inference mode serves training."""
    whole = normal((38, 2))
    pair = Layout.STRIPED, Layout.FOLD
    with torch.inference_mode():
        moved = move(local(whole, 0, pair[0]), 0, 38, *pair)
        assert same(moved, local(whole, 0, pair[1]))
    x = local(whole, 0, pair[0]).requires_grad_()
    move(x, 0, 38, *pair).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("length", [64, 67, 5])
@on_ranks("world")
def test_gradients(world, length):
    """sum(w * y**3), where y is x in another layout, and its gradient."""
    x, w, v = (normal(shape_of(length, 1), seed=seed) for seed in range(3))
    for source, target in PAIRS:
        leaf = local(x, 1, source).requires_grad_()
        y = move(leaf, 1, length, source, target)
        loss = (local(w, 1, target) * y**3).sum()
        (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
        assert_close("grad", grad, local(3 * w * x**2, 1, source))
        (second,) = torch.autograd.grad((grad * local(v, 1, source)).sum(), leaf)
        assert_close("second", second, local(6 * w * x * v, 1, source))
