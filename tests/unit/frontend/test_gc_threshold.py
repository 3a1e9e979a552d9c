"""While a graph is compiled Python looks for garbage rarely, and as before after it."""

import gc

import pytest

from cpcompile.frontend.interpreter_state import gc_paused


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
