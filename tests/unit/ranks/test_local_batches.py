"""cp.shard_batch: which tokens each rank gets, and what is remembered of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import cpcompile as cp
from cpcompile.errors import InputError
from cpcompile.geometry.layout import Layout, TokenLayout
from cpcompile.ranks.local_batches import SequenceLayout, sequence_of
from tests.golden.capture import fake_mesh

RANKS = 4


@pytest.fixture(params=range(RANKS))
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    """Each rank in turn of a mesh (dp=1, cp=4) that exchanges nothing."""
    with fake_mesh(1, RANKS, names=("dp", "cp"), rank=request.param) as mesh:
        yield mesh


@pytest.fixture
def rank_1() -> Iterator[DeviceMesh]:
    with fake_mesh(RANKS) as mesh:
        yield mesh


@pytest.mark.parametrize("layout", Layout, ids=lambda each: each.value)
@pytest.mark.parametrize("length", [16, 17, 3])
def test_every_rank_gets_its_tokens(mesh, layout, length) -> None:
    ids = torch.arange(2 * length).view(2, length)
    batch = {"ids": ids, "rest": [ids + 100, "text"], "scale": 3}
    local = cp.shard_batch(batch, mesh, layout=layout.value)
    rank = mesh["cp"].get_local_rank()
    positions = TokenLayout.of(layout, length, RANKS).positions(rank)
    assert local["position_ids"].tolist() == [positions.tolist()]
    assert torch.equal(local["ids"], ids[:, positions])
    assert torch.equal(local["rest"][0], ids[:, positions] + 100)
    assert (local["rest"][1], local["scale"]) == ("text", 3)
    assert sequence_of(local["ids"], mesh.get_group("cp")) == SequenceLayout(
        length, layout
    )


def test_other_nests_and_dims(rank_1) -> None:
    x = torch.arange(8)
    assert cp.shard_batch(x, rank_1, dim=0).tolist() == [2, 3]
    first, second = cp.shard_batch((x[None], x[None, :, None]), rank_1)
    assert (first.tolist(), second.tolist()) == ([[2, 3]], [[[2], [3]]])
    batch = {"ids": x[None], "position_ids": x[None] % 4}  # own positions stay
    assert cp.shard_batch(batch, rank_1)["position_ids"].tolist() == [[2, 3]]
    with pytest.raises(InputError, match=r"got a DTensor \(1, 8\); needed plain"):
        cp.shard_batch(cp.shard(torch.zeros(1, 8), rank_1, 1), rank_1)


def test_the_last_batch_of_a_group_counts() -> None:
    for _ in range(2):
        with fake_mesh(RANKS) as mesh:
            group, x = mesh.get_group(), torch.zeros(2)
            assert sequence_of(x, group) is None
            for length in (8, 7):
                cp.shard_batch(torch.zeros(1, length), mesh)
                known = sequence_of(x, group)
                assert known == SequenceLayout(length, Layout.CONTIGUOUS)


def test_labels_are_shifted_over_the_borders_of_ranks(mesh) -> None:
    labels = torch.arange(10, 18)[None]
    local = cp.shard_batch({"labels": labels}, mesh, shift_labels=True)
    rank = mesh["cp"].get_local_rank()
    following = [*range(11, 18), -100][2 * rank : 2 * rank + 2]
    assert local["shift_labels"].tolist() == [following]
    assert "labels" not in local
    assert labels.tolist() == [list(range(10, 18))]


def test_a_recomputed_forward_has_the_batch_of_its_forward(rank_1) -> None:
    """The backward comes when the next batch, with as many local tokens, is cut."""
    group, seen = rank_1.get_group(), []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(sequence_of(x, group))
        return x.sin()

    cp.shard_batch(torch.zeros(1, 8), rank_1)
    x = torch.ones(2, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)
    cp.shard_batch(torch.zeros(1, 7), rank_1)
    y.sum().backward()
    assert [each.length for each in seen] == [8, 8]


@pytest.mark.parametrize(
    ("batch", "given", "text"),
    [
        ({"n": 1}, {}, "got no tensor; needed at least one"),
        (
            [torch.zeros(1, 8), torch.zeros(1, 9)],
            {},
            "got tensors of [8, 9] tokens in dimension 1: (1, 8), (1, 9); needed one "
            "length: cut others by hand, or leave them out",
        ),
        (
            torch.zeros(8),
            {},
            "got dim 1 for a tensor of shape (8,); needed a dimension from -1 to 0",
        ),
        (torch.zeros(1, 8), {"layout": "zig"}, "got layout 'zig'; needed one of"),
        (
            torch.zeros(1, 8),
            {"shift_labels": True},
            "got shift_labels=True and a Tensor; needed a dict with 'labels'",
        ),
        (
            {"ids": torch.zeros(1, 8)},
            {"shift_labels": True},
            "got shift_labels=True and a batch of ['ids']; needed a tensor 'labels'",
        ),
    ],
)
def test_bad_batches(rank_1, batch, given, text) -> None:
    with pytest.raises(InputError, match=re.escape(f"cp.shard_batch: {text}")):
        cp.shard_batch(batch, rank_1, **given)
