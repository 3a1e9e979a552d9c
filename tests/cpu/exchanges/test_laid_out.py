"""Tokens that are cut from full tensors, and gathered, in every layout.

The reference says with plain indices which elements a rank has. Nothing is computed,
so results are equal, not close.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from cpcompile.geometry.layout import Layout, TokenLayout
from cpcompile.passes.placement.laid_out import gather_tokens
from tests.cpu.on_ranks import on_ranks

RANKS = 4
LENGTHS = (16, 13, 9, 5)  # of the last, a rank has no token


def elements(tokens: TokenLayout, rank: int, outer: int = 1, inner: int = 1) -> Tensor:
    """Which indices of a dimension [outer, tokens, inner] a rank has."""
    found = [
        (row * tokens.length + position) * inner + place
        for row in range(outer)
        for position in tokens.positions(rank).tolist()
        for place in range(inner)
    ]
    return torch.tensor(found, dtype=torch.int64)


def check(
    x: Tensor,
    mesh: DeviceMesh,
    axis: int,
    placements: tuple[Placement, ...],
    tokens: TokenLayout,
    part: Callable[[Tensor], Tensor],
) -> None:
    """Gather `x`, of which this rank has part(x).

    Gradients are those of indexing: every element has that of the rank that has it.
    """
    grad = torch.randn_like(x)
    whole = {"shape": x.shape, "stride": x.stride()}
    sharded = DTensor.from_local(part(x), mesh, placements, run_check=False, **whole)
    sharded.requires_grad_()
    gathered = gather_tokens(sharded, axis, tokens)
    assert not isinstance(gathered, DTensor)
    assert torch.equal(gathered, x)
    gathered.backward(grad)
    assert sharded.grad.placements == placements
    assert torch.equal(sharded.grad.to_local(), part(grad))


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("length", LENGTHS)
@on_ranks(RANKS)
def test_on_one_axis(layout: Layout, length: int) -> None:
    """Every dimension that tokens can be in."""
    mesh = init_device_mesh("cpu", (RANKS,))
    tokens = TokenLayout.of(layout, length, RANKS)
    cases = [
        ((length,), 0, 1, 1),
        ((2, length, 3), 1, 1, 1),
        ((2, 3, length), 2, 1, 1),
        ((3 * length, 2), 0, 3, 1),
        ((2, 2 * length), 1, 2, 1),
    ]
    if length % RANKS == 0:
        cases += [((2, 3 * length, 2), 1, 1, 3), ((12 * length,), 0, 3, 4)]
    for shape, dim, outer, inner in cases:
        mine = elements(tokens, mesh.get_rank(), outer, inner)
        strided = _StridedShard(dim, split_factor=outer)
        placements = (Shard(dim) if outer == 1 else strided,)
        x = torch.randn(shape, dtype=torch.float64)
        check(x, mesh, 0, placements, tokens, pick(dim, mine))


def pick(dim: int, index: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x.index_select(dim, index)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("length", [8, 7])
@on_ranks(RANKS)
def test_on_two_axes(layout: Layout, length: int) -> None:
    """The other axis has a part of the batch, or all of it."""
    mesh = init_device_mesh("cpu", (2, 2))
    row, column = mesh.get_coordinate()
    tokens = TokenLayout.of(layout, length, 2)
    mine = elements(tokens, column)
    x = torch.randn(4, length, 3, dtype=torch.float64)
    check(x, mesh, 1, (Replicate(), Shard(1)), tokens, pick(1, mine))
    check(
        x,
        mesh,
        1,
        (Shard(0), Shard(1)),
        tokens,
        lambda x: x.chunk(2)[row][:, mine],
    )
    mine_first = elements(tokens, row)
    check(
        x,
        mesh,
        0,
        (Shard(1), Shard(0)),
        tokens,
        lambda x: x.chunk(2)[column][:, mine_first],
    )
    rows = elements(tokens, column, outer=2)
    check(
        x.flatten(0, 1),
        mesh,
        1,
        (Shard(0), _StridedShard(0, split_factor=2)),
        tokens,
        lambda x: x.chunk(2)[row][rows],
    )
