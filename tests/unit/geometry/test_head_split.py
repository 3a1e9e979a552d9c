"""Every rank has the key heads that its query heads read, grouped evenly."""

from hypothesis import given
from hypothesis import strategies as st

from cpcompile.geometry.head_split import HeadSplit

ranks = st.integers(1, 9)


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
