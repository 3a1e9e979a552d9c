"""While a graph is compiled: few collections of garbage, and a stack with room."""

import gc
import resource

import pytest

from cpcompile.frontend.interpreter_state import gc_paused, with_large_stack


@pytest.fixture
def threshold():
    before = gc.get_threshold()
    yield gc.set_threshold
    gc.set_threshold(*before)


def test_looks_rarely_inside_and_as_before_after_an_error(threshold):
    threshold(700, 11, 12)
    with pytest.raises(KeyError), gc_paused():
        assert gc.get_threshold() == (50_000, 11, 12)
        with gc_paused():
            pass
        assert gc.get_threshold() == (50_000, 11, 12)
        raise KeyError
    assert gc.get_threshold() == (700, 11, 12)


@pytest.mark.parametrize("mine", [(0, 10, 10), (80_000, 10, 10)])
def test_what_the_user_has_set_higher_stays(threshold, mine):
    threshold(*mine)
    with gc_paused():
        assert gc.get_threshold() == mine


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
