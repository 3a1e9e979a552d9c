"""Graphs of AOTAutograd of Ulysses and hybrids; see test_insert_attention.py, too."""

import re

import pytest

from cpcompile.kernels import choice
from tests.golden.golden_text import assert_golden, lines_with
from tests.golden.ring_graphs import brief, expand, text, traced


def test_the_ring_of_a_hybrid():
    """Rank 3 of 4, the ring inside: two runs of queries have a chain of steps each."""
    forward, _ = traced(3, 4, strategy="hybrid", inner="ring")
    assert expand(forward, 3, 4, inner="ring") == 1
    assert_golden(
        lines_with(brief(forward), "= cp.attention_step", "= cp.ring_shift"),
        """\
shift = cp.ring_shift([ulysses_scatter[1], ulysses_scatter[2]], group=RING,
    where='keys and values, step 0')
step = cp.attention_step(split_with_sizes[0], ulysses_scatter[1], ulysses_scatter[2],
    keys=[0, 4], upper=[1, 1], final=False, after=shift[0])
step_1 = cp.attention_step(split_with_sizes[1], ulysses_scatter[1], ulysses_scatter[2],
    upper=[5, 5], final=False, after=step[0])
step_2 = cp.attention_step(split_with_sizes[0], wait, wait_1, step[0], step[1],
    keys=[0, 4], final=True)
step_3 = cp.attention_step(split_with_sizes[1], wait, wait_1, step_1[0], step_1[1],
    final=True, after=step_2[0])""",
    )


def test_the_backward_of_the_ring_of_a_hybrid(monkeypatch):
    """As the templates do it: dK and dV travel while dQ of both runs is computed."""
    monkeypatch.setattr(choice, "_has_triton", lambda: True)
    _, backward = traced(3, 4, strategy="hybrid", inner="ring")
    assert expand(backward, 3, 4, kernel="triton", inner="ring") == 1
    calls = lines_with(text(backward), "= cp.").replace("split_with_sizes", "part")
    calls = re.sub("(attention_)?step_backward", "back", calls)
    for alike in (" spec='scale=0.5',", " kernel='triton',"):
        assert calls.count(alike) == calls.count("= cp.back") == 8
        calls = calls.replace(alike, "")
    assert_golden(
        lines_with(calls.replace(" group=RING,", ""), "= cp.ring_shift", "= cp.back"),
        """\
shift = cp.ring_shift([k, v], where='keys and values, step 0')
back = cp.back(part[0], part_1[0], k, v, part_2[0], part_3[0], parts='dkdv',
    keys=[0, 4], upper=[1, 1], final=False, after=shift[0])
back_1 = cp.back(part[1], part_1[1], k, v, part_2[1], part_3[1], [back[0], back[1]],
    parts='dkdv', upper=[5, 5], final=False, after=shift[0])
shift_1 = cp.ring_shift([back_1[0], back_1[1]], where='dk and dv, step 0')
back_2 = cp.back(part[0], part_1[0], k, v, part_2[0], part_3[0], parts='dq',
    keys=[0, 4], upper=[1, 1], final=False, after=shift_1[0])
back_3 = cp.back(part[1], part_1[1], k, v, part_2[1], part_3[1], parts='dq',
    upper=[5, 5], final=False, after=back_2[0])
back_4 = cp.back(part[0], part_1[0], wait, wait_1, part_2[0], part_3[0],
    [wait_2, wait_3], parts='dkdv', keys=[0, 4], final=False, after=shift_1[0])
back_5 = cp.back(part[1], part_1[1], wait, wait_1, part_2[1], part_3[1], [back_4[0],
    back_4[1]], parts='dkdv', final=False, after=shift_1[0])
shift_2 = cp.ring_shift([back_5[0], back_5[1]], where='dk and dv, step 1')
back_6 = cp.back(part[0], part_1[0], wait, wait_1, part_2[0], part_3[0], [back_2[0]],
    parts='dq', keys=[0, 4], final=True, after=shift_2[0])
back_7 = cp.back(part[1], part_1[1], wait, wait_1, part_2[1], part_3[1], [back_3[0]],
    parts='dq', final=True, after=back_6[0])""",
    )


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize(("limit", "count"), [(2, 1), (1, 0)])
def test_the_limit_is_that_of_the_ring(direction, limit, count):
    """Two ranks are in the ring of four ranks."""
    graph = traced(1, 4, strategy="hybrid", inner="ring")[direction]
    assert expand(graph, 1, 4, limit=limit, inner="ring") == count
