"""Ranks that share a sequence read the same rows, and keep their part of it."""

import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import cpcompile as cp
from cpcompile.errors import InputError
from cpcompile.geometry.layout import Layout, TokenLayout
from cpcompile.ranks.local_batches import SequenceLayout, sequence_of
from tests.golden.capture import fake_group, fake_mesh

ROWS = list(range(22))


def of_torch(sampler):
    return DataLoader(ROWS, batch_size=2, sampler=sampler)


def of_accelerate(sampler):
    """As docs/howto/trainers.md gives it to accelerate and to the Trainer."""
    device, one = torch.device("cpu"), {"num_processes": 1, "process_index": 0}
    return prepare_data_loader(of_torch(sampler), device, put_on_device=True, **one)


def rows_of_all_ranks(make, shape, names, epochs=1, **given):
    found = []
    for rank in range(4):
        with fake_group(rank=rank, ranks=4):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            loader = make(cp.same_rows(ROWS, mesh, **given))
            for epoch in range(epochs):
                if make is of_torch:
                    loader.sampler.set_epoch(epoch)
                batches = [x.tolist() for x in loader]
            found.append(batches)
            assert len(loader) == len(batches)
    return found


@pytest.mark.parametrize("make", [of_torch, of_accelerate])
@pytest.mark.parametrize("names", [("dp", "cp"), ("cp", "dp")])
def test_ranks_of_a_sequence_read_the_same(make, names):
    found = rows_of_all_ranks(make, (2, 2), names)
    pairs = ((0, 1), (2, 3)) if names[1] == "cp" else ((0, 2), (1, 3))
    for one, other in pairs:
        assert found[one] == found[other]
    both = [x for one, _ in pairs for batch in found[one] for x in batch]
    assert sorted(both) == ROWS
    assert both != ROWS


@pytest.mark.parametrize("make", [of_torch, of_accelerate])
def test_each_epoch_has_an_order_of_its_own(make):
    """accelerate sets the epoch by itself."""
    first, second = (
        rows_of_all_ranks(make, (2, 2), ("dp", "cp"), epochs) for epochs in (1, 2)
    )
    assert first[0] != second[0]
    assert second[0] == second[1]


def test_what_may_be_given():
    """Another seed; rows in their order; two axes that share them; one process."""
    first, second, ordered = (
        rows_of_all_ranks(of_torch, (1, 4), ("dp", "cp"), **given)
        for given in ({"seed": 0}, {"seed": 1}, {"shuffle": False})
    )
    assert first != second
    assert [[x for batch in rows for x in batch] for rows in ordered] == [ROWS] * 4
    found = rows_of_all_ranks(of_torch, (2, 2), ("cp", "tp"), axis=("cp", "tp"))
    assert all(rows == found[0] for rows in found)
    assert sorted(x for batch in found[0] for x in batch) == ROWS
    sampler = cp.same_rows(ROWS, None, shuffle=False)
    assert [int(x) for batch in of_torch(sampler) for x in batch] == ROWS


@pytest.mark.parametrize(("drop_last", "rows"), [(True, 5), (False, 6)])
def test_rows_that_are_left_over(drop_last, rows):
    """Dropped, or read twice to be even."""
    found = rows_of_all_ranks(of_torch, (4, 1), ("dp", "cp"), drop_last=drop_last)
    assert [sum(map(len, batches)) for batches in found] == [rows] * 4


class Stream(IterableDataset):
    def __iter__(self):
        yield from ROWS


@pytest.mark.parametrize(
    ("given", "shape", "text"),
    [
        (DataLoader(ROWS), (2, 2), "got a DataLoader; needed a dataset with a length"),
        (
            DistributedSampler(ROWS, num_replicas=3, rank=0),
            (2, 2),
            "got a DistributedSampler; needed a dataset with a length",
        ),
        (Stream(), (2, 2), "got a Stream; needed a dataset with a length"),
        (ROWS, (1, 2), "got a mesh of 2 ranks; needed the one with all 4"),
    ],
)
def test_what_has_no_rows_to_share_out(given, shape, text):
    with fake_group(ranks=4):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
        with pytest.raises(InputError, match=re.escape(text)):
            cp.same_rows(given, mesh)


MESH_AXES = {"cp": 2}
SHAPE = (1, 2, 5, 4)


def layer(device="cpu", **changes):
    fields = {
        "keys": torch.ones(SHAPE, device=device),
        "values": torch.ones(SHAPE, dtype=torch.bfloat16, device=device),
        "device": torch.device(device),
        "cumulative_length": torch.zeros((), dtype=torch.int64, device=device),
    }
    return SimpleNamespace(**(fields | changes))


@pytest.mark.parametrize(("device", "filled"), [("cpu", 1.0), ("meta", 0.0)])
def test_each_rank_keeps_its_part(mesh, device, filled):
    cache = SimpleNamespace(layers=[layer(device), layer(device, is_sliding=True)])
    assert cp.shard_cache(cache, mesh) is cache
    full, window = cache.layers
    for x, dtype in ((full.keys, torch.float32), (full.values, torch.bfloat16)):
        assert isinstance(x, DTensor) and x.placements == (Shard(2),)
        assert x.shape == SHAPE and x.dtype == dtype
        assert x.to_local().shape == (1, 2, 2, 4)  # 3 of 5 tokens are rank 0's
        assert bool((x.to_local() == filled).all())
    for each in (full, window):
        assert each.device == torch.device("cpu")
        assert each.cumulative_length.device == torch.device("cpu")
        assert int(each.cumulative_length) == 0
    assert not isinstance(window.keys, DTensor)
    assert bool((window.keys == filled).all()) and window.keys.shape == SHAPE


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        (SimpleNamespace(), "got SimpleNamespace; needed a static cache"),
        (SimpleNamespace(layers=[layer(keys=None)]), "keys of layer 0 are NoneType"),
        (
            SimpleNamespace(layers=[layer(), layer(values=torch.zeros(2, 3))]),
            r"values of layer 1 are \[2, 3\]; needed .* early_initialization",
        ),
    ],
)
def test_what_is_no_static_cache(mesh, cache, said):
    with pytest.raises(InputError, match=said):
        cp.shard_cache(cache, mesh)
    cache = SimpleNamespace(layers=[layer()])
    refused = pytest.raises(InputError, match=r"the axes \('dp', 'cp'\); needed")
    with fake_mesh(2, 2, names=("dp", "cp")) as several, refused:
        cp.shard_cache(cache, several)
    cp.shard_cache(cache, mesh)
    with pytest.raises(InputError, match="keys of layer 0 are a DTensor already"):
        cp.shard_cache(cache, mesh)


RANKS = 4


@pytest.fixture(params=range(RANKS))
def each_rank(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    """Each rank in turn of a mesh (dp=1, cp=4) that exchanges nothing."""
    with fake_mesh(1, RANKS, names=("dp", "cp"), rank=request.param) as mesh:
        yield mesh


@pytest.fixture
def rank_1() -> Iterator[DeviceMesh]:
    with fake_mesh(RANKS) as mesh:
        yield mesh


@pytest.mark.parametrize("layout", Layout, ids=lambda each: each.value)
@pytest.mark.parametrize("length", [16, 17, 3])
def test_every_rank_gets_its_tokens(each_rank, layout, length) -> None:
    ids = torch.arange(2 * length).view(2, length)
    batch = {"ids": ids, "rest": [ids + 100, "text"], "scale": 3}
    local = cp.shard_batch(batch, each_rank, layout=layout.value)
    rank = each_rank["cp"].get_local_rank()
    positions = TokenLayout.of(layout, length, RANKS).positions(rank)
    assert local["position_ids"].tolist() == [positions.tolist()]
    assert torch.equal(local["ids"], ids[:, positions])
    assert torch.equal(local["rest"][0], ids[:, positions] + 100)
    assert (local["rest"][1], local["scale"]) == ("text", 3)
    assert sequence_of(local["ids"], each_rank.get_group("cp")) == SequenceLayout(
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


def test_labels_are_shifted_over_the_borders_of_ranks(each_rank) -> None:
    labels = torch.arange(10, 18)[None]
    local = cp.shard_batch({"labels": labels}, each_rank, shift_labels=True)
    rank = each_rank["cp"].get_local_rank()
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
