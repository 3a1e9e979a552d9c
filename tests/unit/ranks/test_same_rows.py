"""Ranks that share a sequence read the same rows."""

import re

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import cpcompile as cp
from cpcompile.errors import InputError
from tests.golden.capture import fake_group

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
