"""No call inside of with_large_stack maps memory for its frame, at any depth."""

import resource

import pytest

from cpcompile.frontend.interpreter_state import with_large_stack


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
    found = with_large_stack(lambda: [faults(depth) for depth in range(400)])
    assert max(found) < 250  # 500 and more where a piece of the stack ends


def test_results_and_errors_pass():
    assert with_large_stack(lambda: with_large_stack(lambda: 3)) == 3
    with pytest.raises(KeyError, match="x"):
        with_large_stack(lambda: {}["x"])
