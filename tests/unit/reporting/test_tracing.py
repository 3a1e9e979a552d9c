"""What becomes of the records of torch.profiler: events in lanes, times of calls."""

import json
from dataclasses import replace

import pytest

from cpcompile.reporting.tracing.chrome import chrome_trace
from cpcompile.reporting.tracing.clock_offsets import Clock, ahead
from cpcompile.reporting.tracing.events import (
    ATTENTION,
    GATHERS,
    LANES,
    PROGRAM,
    SHIFTS,
    STEPS,
    WAITS,
    events_of,
)
from cpcompile.reporting.tracing.measured import Measured, measured

KEYS = "keys and values of the {} of ring attention, step 0"
GROUP = ", rank 1 of 2 in group '0'"


def records(*items):
    """(name, start, end) in microseconds, as the profiler has them."""
    return [(name, start * 1000, (end - start) * 1000) for name, start, end in items]


def ring(start, direction="forward", labelled=True):
    """A ring of two ranks: a message, a step that hides it, waits, the last step."""
    where = KEYS.format(direction)
    step = "cp::attention_step" + "_backward" * (direction == "backward")
    wait = "cp::ring_wait" if labelled else "_c10d_functional::wait_tensor"
    found = [
        ("cp::ring_shift", start, start + 2),
        (f"cp: {where}{GROUP}", start + 1, start + 2),
        (step, start + 2, start + 10),
        (wait, start + 10, start + 13),
        (wait, start + 13, start + 14),
        (step, start + 14, start + 20),
    ]
    if labelled:
        found += [(f"cp: {where}", start + 10, start + 12)]
        found += [(f"cp: {where}", start + 13, start + 14)]
        found += [("_c10d_functional::wait_tensor", start + 10, start + 11)]
        suffix = "_backward" * (direction == "backward")
        found += [(f"cp::ring_attention{suffix}", start - 1, start + 21)]
    return found


def lane(events, name):
    return [(x.name, x.start, x.end) for x in events if x.lane == name]


@pytest.mark.parametrize("labelled", [True, False], ids=["looped", "unrolled"])
def test_a_ring_has_steps_waits_and_messages_that_end_with_their_last_wait(labelled):
    events = events_of(records(*ring(100, labelled=labelled)))
    where = KEYS.format("forward")
    assert lane(events, SHIFTS) == [(where, 100, 114)]
    assert lane(events, WAITS) == [(where, 110, 113), (where, 113, 114)]
    first, last = (
        ("step 0: attention_step", 102, 110),
        (
            "step 1: attention_step",
            114,
            120,
        ),
    )
    assert lane(events, STEPS) == [first, last]
    if labelled:
        assert lane(events, ATTENTION) == [("cp::ring_attention", 99, 121)]
    else:
        assert lane(events, ATTENTION) == [("cp::ring_attention (unrolled)", 100, 120)]


def test_an_exchange_of_heads_is_one_call_from_the_first_exchange_to_the_last():
    found = [
        ("cp: forward of step", 0, 30),
        ("cp::ulysses_scatter", 1, 5),
        ("c10d::alltoall_base_", 2, 4),
        ("cp::ulysses_gather", 20, 24),
        ("CompiledFunctionBackward", 40, 70),
        ("cp::ulysses_scatter", 41, 45),
        ("cp::ulysses_gather", 60, 64),
    ]
    events = events_of(records(*found))
    assert lane(events, ATTENTION) == [
        ("cp::ulysses_attention", 1, 24),
        ("cp::ulysses_attention_backward", 41, 64),
    ]
    assert "c10d::alltoall_base_" not in str(lane(events, GATHERS))
    assert lane(events, PROGRAM) == [("forward of step", 0, 30), ("backward", 40, 70)]
    assert measured([events], 1) == [Measured(46e-6, 16e-6)]


def test_an_exchange_of_heads_in_groups_is_one_call():
    found = [
        ("cp::ulysses_scatter_start", 1, 2),
        ("cp::ulysses_scatter_start", 2, 3),
        ("cp::ulysses_scatter_finish", 3, 4),
        ("cp::ulysses_gather_start", 8, 9),
        ("cp::ulysses_scatter_finish", 9, 10),
        ("cp::ulysses_gather_finish", 15, 16),
        ("cp::ulysses_gather_start", 16, 17),
        ("cp::ulysses_gather_finish", 17, 20),
        ("cp::ulysses_scatter_start", 41, 42),
        ("cp::ulysses_gather_finish", 60, 64),
    ]
    events = events_of(records(("cp: forward of step", 0, 90), *found))
    assert lane(events, ATTENTION) == [
        ("cp::ulysses_attention", 1, 20),
        ("cp::ulysses_attention", 41, 64),
    ]


@pytest.mark.parametrize("labelled", [True, False], ids=["looped", "unrolled"])
def test_a_ring_between_exchanges_of_heads_is_a_hybrid(labelled):
    found = [("cp: forward of step", 90, 140), ("cp::ulysses_scatter", 95, 98)]
    found += [*ring(100, labelled=labelled), ("cp::ulysses_gather", 122, 124)]
    events = events_of(records(*found))
    assert lane(events, ATTENTION) == [("cp::hybrid_attention", 95, 124)]
    assert len(lane(events, STEPS)) == 2 and len(lane(events, WAITS)) == 2
    assert measured([events], 1) == [Measured(29e-6, 9e-6)]


def test_an_operator_that_has_a_ring_inside_is_counted_once():
    events = events_of(records(("cp::hybrid_attention", 90, 130), *ring(100)))
    assert lane(events, ATTENTION) == [("cp::hybrid_attention", 90, 130)]


def test_clocks_of_other_hosts_are_brought_to_the_first():
    here, there = "a", "b"
    times = tuple(range(0, 9000, 1000))
    late = tuple(t + 5_000_000 + (700 if t == 3000 else 20) for t in times)
    clocks = [Clock(here, times), Clock(here, late), Clock(there, late)]
    assert ahead(clocks) == [0.0, 0.0, 5000.02]
    events = events_of(records(*ring(100)))
    moved = [replace(x, start=x.start + 5000.02) for x in events]
    trace = json.loads(chrome_trace([events, moved], ahead=[0.0, 5000.02]))
    starts = {x["ts"] for x in trace["traceEvents"] if x.get("cat") == ATTENTION}
    assert len(starts) == 1


def test_times_of_calls_are_those_of_the_slowest_rank_and_of_both_directions():
    both = [*ring(100), *ring(200), *ring(300, "backward"), *ring(400, "backward")]
    slow = [(n, s, e + 5 if n == "cp::ring_attention" else e) for n, s, e in both]
    ranks = [events_of(records(*x)) for x in (both, slow)]
    first, second = measured(ranks, 2)
    assert first.seconds == pytest.approx(49e-6)
    assert second.exposed_seconds == pytest.approx(8e-6)
    assert measured(ranks, 3) is None and measured([], 1) is None


def test_what_nobody_asked_for_is_left_out():
    assert events_of(records(("aten::mm", 1, 2), ("my own name", 1, 2))) == []


def test_the_trace_has_a_process_per_rank_and_a_thread_per_lane():
    events = events_of(records(*ring(100)))
    found = json.loads(chrome_trace([events, events], ["a table"]))
    assert found["otherData"]["about"] == ["a table"]
    names = [x for x in found["traceEvents"] if x["name"] == "thread_name"]
    assert [x["args"]["name"] for x in names] == [*LANES, *LANES]
    whole = [x for x in found["traceEvents"] if x["ph"] == "X"]
    assert {x["pid"] for x in whole} == {0, 1} and min(x["ts"] for x in whole) == 0.0
    shift = next(x for x in whole if x["cat"] == SHIFTS)
    assert shift["dur"] == 14.0 and LANES[shift["tid"]] == SHIFTS
