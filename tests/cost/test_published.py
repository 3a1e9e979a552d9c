"""Published formulas: the same numbers."""

from __future__ import annotations

import pytest

from tests.cost.published import balanced_speedups, copy_shares, hiding_chunks


def test_speedups_of_the_striped_attention_paper_to_the_printed_digit() -> None:
    found = balanced_speedups()
    assert len(found) == 137
    assert [each for each in found if each.ours != each.published] == []


def test_chunks_that_hide_a_hop_in_the_ring_attention_paper() -> None:
    found = {each.name: each for each in hiding_chunks()}
    # 312 / 12.5 is 25.0; the paper prints 24.5 and, for six chunks, 149.5.
    slip = found.pop("A100 IB")
    assert slip.ours == 25.0
    assert slip.ours == pytest.approx(149.5 / 6, abs=0.1)
    assert [each for each in found.values() if each.ours != each.published] == []
    assert len(found) == 4


def test_copies_are_a_large_part_of_an_all_to_all() -> None:
    # The published share is that of permuting; ours that of reading and writing at the
    # speed of STREAM, and of an all-to-all of 8 ranks.
    for each in copy_shares():
        assert each.published / 1.5 < each.ours < each.published
