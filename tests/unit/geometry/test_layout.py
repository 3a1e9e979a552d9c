"""Chunks and runs partition a sequence, and ranks have the key heads that they read."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from cpcompile.geometry.head_split import HeadSplit
from cpcompile.geometry.layout import Chunks, Runs

lengths = st.integers(0, 70)
ranks = st.integers(1, 9)


@given(lengths, ranks)
def test_chunks_are_those_of_torch_chunk_and_of_dtensor(length, ranks):
    chunks = Chunks(length, ranks)
    parts = torch.arange(length).chunk(ranks)
    for rank in range(ranks):
        start, count = chunks.start(rank), chunks.count(rank)
        expected = parts[rank].tolist() if rank < len(parts) else []
        assert list(range(start, start + count)) == expected
        of_dtensor = Shard.local_shard_size_and_offset(length, ranks, rank)
        assert of_dtensor == (count, start)
    assert chunks.size == max(chunks.count(rank) for rank in range(ranks))


@given(lengths, ranks, st.integers(1, 4))
def test_runs_partition_the_sequence(length, ranks, pieces):
    """As the chunks of ranks * pieces ranks, of which every ranks-th lies together."""
    chunks = Chunks(length, ranks * pieces)
    runs = Runs(length, ranks, chunks.size, pieces)
    found = []
    for rank in range(ranks):
        held = []
        for piece in range(pieces):
            assert runs.offset(rank, piece) == len(held)
            place = piece * ranks + rank
            assert runs.start(rank, piece) == chunks.start(place)
            assert runs.run(rank, piece) == chunks.count(place)
            start = runs.start(rank, piece)
            held += range(start, start + runs.run(rank, piece))
        assert runs.count(rank) == len(held) <= runs.padded
        found += held
    assert sorted(found) == list(range(length))


@given(st.integers(1, 6), st.integers(1, 6), ranks)
def test_every_query_head_meets_its_key_head(kv_heads, group, ranks):
    heads = kv_heads * group
    split = HeadSplit(heads, kv_heads, ranks)
    queries = HeadSplit(heads, heads, ranks)
    assert queries.copies == 1
    assert queries.kv_per_rank == split.per_rank == queries.per_rank
    assert split.places <= split.kv_per_rank * ranks
    of_place = [head for head in range(kv_heads) for _ in range(split.copies)]
    for head in range(heads):
        rank, slot = divmod(head, split.per_rank)
        run = split.per_rank // split.kv_per_rank  # what the kernel groups by
        place = rank * split.kv_per_rank + slot // run
        assert of_place[place] == head // group


def test_key_heads_are_repeated_as_far_as_needed():
    def keys(heads, kv_heads, ranks):
        split = HeadSplit(heads, kv_heads, ranks)
        return split.per_rank, split.kv_per_rank, split.copies

    assert keys(32, 8, 4) == (8, 2, 1)  # the heads divide: nothing is repeated
    assert keys(32, 8, 16) == (2, 1, 2)  # two ranks read each
    assert keys(8, 1, 4) == (2, 1, 4)
    assert keys(4, 1, 8) == (1, 1, 4)  # ranks without a query head get none
    assert keys(12, 2, 3) == (4, 2, 3)  # rank 1 reads both; two places on every rank
    assert keys(6, 6, 4) == (2, 2, 1)
