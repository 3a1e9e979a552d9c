"""cp.shard and cp.unshard, their errors, and looking up the axis of a mesh."""

from collections.abc import Iterator
from textwrap import fill

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import cpcompile as cp
from cpcompile.errors import InputError
from cpcompile.ranks.shardings import (
    axis_index,
    check_dim,
    check_process_group,
    is_sequence_sharded,
    local_range,
    placements_text,
)
from tests.golden.capture import fake_mesh

RANKS = 4


@pytest.fixture(params=range(RANKS))
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    """Each rank in turn of a mesh (cp=4) that exchanges nothing."""
    with fake_mesh(RANKS, rank=request.param) as mesh:
        yield mesh


@pytest.fixture
def mesh_2d() -> Iterator[DeviceMesh]:
    """Rank 1 of a mesh (dp=2, cp=2)."""
    with fake_mesh(2, 2, names=("dp", "cp")) as mesh:
        yield mesh


def rejected(call, *args, **kwargs):
    with pytest.raises(InputError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("length", [8, 7, 5, 2])
@pytest.mark.parametrize("dim", [1, -2])
def test_every_rank_has_its_chunk(mesh, length, dim):
    """As torch.chunk makes them; the last ones may be shorter or empty."""
    x = torch.randn(2, length, 3)
    chunks = [*torch.chunk(x, RANKS, 1), *[x[:, :0]] * RANKS]
    y = cp.shard(x, mesh, dim)
    assert y.placements == (Shard(1),)
    assert y.shape == x.shape
    rank = mesh.get_local_rank()
    torch.testing.assert_close(y.to_local(), chunks[rank], rtol=0, atol=0)
    start, count = local_range(length, mesh, 0)
    assert torch.equal(x[:, start : start + count], chunks[rank])


def test_other_axes_are_replicated(mesh_2d):
    y = cp.shard(torch.arange(6), mesh_2d, 0)
    assert y.placements == (Replicate(), Shard(0))
    assert y.to_local().tolist() == [3, 4, 5]
    y = cp.shard(torch.arange(6), mesh_2d, 0, axis="dp")
    assert y.placements == (Shard(0), Replicate())
    assert y.to_local().tolist() == [0, 1, 2]


def test_there_and_back(one_rank):
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    y = cp.unshard(cp.shard(x, one_rank, 1))
    assert not isinstance(y, DTensor)
    assert torch.equal(y, x)
    grad = torch.randn_like(x)
    y.backward(grad)
    assert torch.equal(x.grad, grad)


def test_the_original_is_not_changed(mesh):
    x = torch.arange(8.0)
    cp.shard(x, mesh, 0).to_local().zero_()
    assert x.tolist() == list(range(8))


@pytest.mark.parametrize("x", [[1, 2], 3, None])
def test_shard_of_no_tensor(mesh, x):
    text = rejected(cp.shard, x, mesh, 0)
    assert text == f"cp.shard: got a {type(x).__name__}; needed a plain full tensor"


def test_shard_of_a_dtensor(mesh):
    text = rejected(cp.shard, cp.shard(torch.ones(8), mesh, 0), mesh, 0)
    assert text == "cp.shard: got a DTensor; needed a plain full tensor"


def test_unshard_of_a_plain_tensor():
    assert_expected_inline(
        fill(rejected(cp.unshard, torch.ones(2)), 80),
        """cp.unshard: got a Tensor; needed a DTensor, as cp.shard makes""",
    )


@pytest.mark.parametrize("dim", [2, -3, 7])
def test_dim_out_of_range(mesh, dim):
    assert rejected(cp.shard, torch.ones(2, 8), mesh, dim) == (
        f"cp.shard: got dim {dim} for a tensor of shape (2, 8); "
        "needed a dimension from -2 to 1"
    )


def test_dims_count_from_both_ends():
    x = torch.ones(2, 8)
    assert [check_dim("here", x, dim) for dim in (-2, -1, 0, 1)] == [0, 1, 0, 1]


def test_a_scalar_has_no_dim(mesh):
    rejected(cp.shard, torch.tensor(1.0), mesh, 0)


def test_axis_that_is_missing(mesh, mesh_2d):
    texts = [rejected(axis_index, x, "sp") for x in (mesh, mesh_2d)]
    assert_expected_inline(
        "\n".join(fill(text, 80) for text in texts),
        """\
mesh of shape (4,) has the axes cp; needed an axis 'sp': name it in
init_device_mesh(..., mesh_dim_names=(..., "sp")) or pass the name of the axis
that shards the sequence
mesh of shape (2, 2) has the axes dp, cp; needed an axis 'sp': name it in
init_device_mesh(..., mesh_dim_names=(..., "sp")) or pass the name of the axis
that shards the sequence""",
    )


def test_mesh_without_names(mesh):
    assert axis_index(init_device_mesh("cpu", (RANKS,)), "anything") == 0
    text = rejected(axis_index, init_device_mesh("cpu", (2, 2)), "cp")
    assert_expected_inline(
        fill(text, 80),
        """\
mesh of shape (2, 2) has no axis names; needed an axis 'cp': name it in
init_device_mesh(..., mesh_dim_names=(..., "cp")) or pass the name of the axis
that shards the sequence""",
    )


def test_axes_are_found(mesh_2d):
    assert [axis_index(mesh_2d, axis) for axis in ("dp", "cp")] == [0, 1]


def test_no_process_group():
    assert not dist.is_initialized()
    assert_expected_inline(
        fill(rejected(check_process_group), 80),
        """\
backend="cp" needs a process group, and there is none: start the program with
torchrun and call torch.distributed.init_process_group() first""",
    )


def test_a_process_group(one_rank):
    check_process_group()


def local(mesh, *placements):
    return DTensor.from_local(torch.ones(2, 3), mesh, placements, run_check=False)


def test_texts_of_placements(mesh_2d):
    assert placements_text(local(mesh_2d, Shard(0), Replicate())) == "S(0),R"
    assert placements_text(local(mesh_2d, Partial(), Shard(1))) == "P(sum),S(1)"
    assert placements_text(torch.ones(2)) == "plain"


def test_is_sequence_sharded(mesh_2d):
    x = local(mesh_2d, Replicate(), Shard(1))
    assert is_sequence_sharded(x, 1)
    assert not is_sequence_sharded(x, 0)
    assert not is_sequence_sharded(local(mesh_2d, Partial(), Replicate()), 1)
    assert not is_sequence_sharded(torch.ones(2, 3), 1)
