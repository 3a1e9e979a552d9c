"""Ranks that share a sequence read the same rows."""

import re

import pytest
import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler

import cpcompile as cp
from cpcompile.errors import InputError
from tests.golden.capture import fake_group

ROWS = list(range(22))


def of_torch(drop_last=False):
    sampler = DistributedSampler(ROWS, shuffle=True, seed=3, drop_last=drop_last)
    return DataLoader(ROWS, batch_size=2, sampler=sampler)


def of_accelerate():
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(ROWS, batch_size=2, shuffle=True, generator=generator)
    here = {"num_processes": 4, "process_index": dist.get_rank()}
    return prepare_data_loader(loader, torch.device("cpu"), **here)


def rows_of_all_ranks(make, shape, names, **given):
    found = []
    for rank in range(4):
        with fake_group(rank=rank, ranks=4):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            loader = cp.same_rows(make(), mesh, **given)
            found.append([x.tolist() for x in loader])
            assert len(loader) == len(found[-1])
    return found


@pytest.mark.parametrize("make", [of_torch, of_accelerate])
@pytest.mark.parametrize("names", [("dp", "cp"), ("cp", "dp")])
def test_ranks_of_a_sequence_read_the_same(make, names):
    found = rows_of_all_ranks(make, (2, 2), names)
    pairs = ((0, 1), (2, 3)) if names[1] == "cp" else ((0, 2), (1, 3))
    for one, other in pairs:
        assert found[one] == found[other]
    both = [x for one, _ in pairs for batch in found[one] for x in batch]
    assert sorted(set(both)) == ROWS
    assert len(both) <= len(ROWS) + 4  # some twice, to be even


def test_tensor_parallel_ranks_share_them_too():
    found = rows_of_all_ranks(of_torch, (2, 2), ("cp", "tp"), axis=("cp", "tp"))
    assert all(rows == found[0] for rows in found)
    assert sorted(x for batch in found[0] for x in batch) == ROWS


def test_rows_that_are_left_over_may_be_dropped():
    found = rows_of_all_ranks(lambda: of_torch(True), (4, 1), ("dp", "cp"))
    assert [sum(map(len, rows)) for rows in found] == [5] * 4


def test_one_rank_reads_all_rows():
    """accelerate leaves the loader of one process as it is."""
    loader = DataLoader(ROWS)
    with fake_group(rank=0, ranks=1):
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
        assert cp.same_rows(loader, mesh) is loader
    assert [int(x) for batch in loader for x in batch] == ROWS


@pytest.mark.parametrize(
    ("make", "shape", "text"),
    [
        (lambda: DataLoader(ROWS), (2, 2), "got a DataLoader that shares no rows out"),
        (
            lambda: DistributedSampler(ROWS, num_replicas=3, rank=0),
            (2, 2),
            "DistributedSampler shares rows out among 3 ranks; needed all 4",
        ),
        (of_torch, (1, 2), "got a mesh of 2 ranks; needed the one with all 4"),
    ],
)
def test_bad_loaders(make, shape, text):
    with fake_group(ranks=4):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
        with pytest.raises(InputError, match=re.escape(text)):
            cp.same_rows(make(), mesh)
