"""No call inside of run_with_room maps memory for its frame, however deep it stands."""

import resource

import pytest

from cpcompile.frontend.frame_chunks import run_with_room


def leaf(n):
    return n


def faults(depth, calls=500):
    """Page faults of so many calls at a depth of the stack."""
    if depth:
        return faults(depth - 1, calls)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for n in range(calls):
        leaf(n)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_no_depth_maps_memory_in_each_call():
    found = run_with_room(lambda: [faults(depth) for depth in range(400)])
    assert max(found) < 250  # 500 and more where a piece of the stack ends


def test_results_and_errors_pass():
    assert run_with_room(lambda: run_with_room(lambda: 3)) == 3
    with pytest.raises(KeyError, match="x"):
        run_with_room(lambda: {}["x"])
