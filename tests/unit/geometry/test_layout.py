"""Chunks and runs partition a sequence, chunks as torch.chunk does."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

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


@given(lengths, ranks)
def test_one_run_is_the_contiguous_layout(length, ranks):
    runs, chunks = Runs.contiguous(length, ranks), Chunks(length, ranks)
    assert runs.padded == chunks.size
    for rank in range(ranks):
        assert runs.start(rank) == chunks.start(rank)
        assert runs.count(rank) == chunks.count(rank)


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
