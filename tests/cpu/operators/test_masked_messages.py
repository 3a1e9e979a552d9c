"""How far chunks go in a ring under a mask, and how many messages that makes."""

from unittest import mock

import pytest

from cpcompile.geometry.layout import Layout
from cpcompile.ops.strategies import ring_steps
from tests.cpu.masked_cases import MaskedCase, check_masked, run_masked

KEYS, SUMS = "keys and values", "dk and dv"


def run_counted(case):
    """How far the messages of each kind go, in order."""
    sent = {}

    def counting(tensors, group, where, after=None, distance=1):
        what, direction = where.split(" of the ")
        key = f"{direction.split()[0]}: {what}"
        sent.setdefault(key, []).append(distance)
        return shift(tensors, group, where, after, distance)

    shift = ring_steps.ring_shift
    with mock.patch.object(ring_steps, "ring_shift", counting):
        got = run_masked(case)
    if got is not None:
        check_masked(case, got)
    return sent


def jumps(pools, case, *keys, home):
    """Assert that chunks jump so, and their sums too, which come home then."""
    keys = list(keys)
    wanted = {f"forward: {KEYS}": keys, f"backward: {KEYS}": keys}
    wanted[f"backward: {SUMS}"] = [*keys, home]
    assert pools[case.world].run(run_counted, case) == [wanted] * case.world


@pytest.mark.parametrize("known", [False, True])
def test_a_window_sends_to_the_next_rank_only(pools, known):
    jumps(pools, MaskedCase("window", world=4, known=known), 1, home=3)


def test_a_window_in_both_directions_sends_two_messages(pools):
    jumps(pools, MaskedCase("both sides", world=4), 1, 2, home=1)


@pytest.mark.parametrize("layout", [Layout.CONTIGUOUS, Layout.ZIGZAG], ids=str)
def test_a_causal_mask_sends_all_there_is(pools, layout):
    jumps(pools, MaskedCase("causal", world=4, layout=layout), 1, 1, 1, home=1)


def test_a_bias_sends_all_there_is(pools):
    jumps(pools, MaskedCase("bias of batch", world=4, seq=67), 1, 1, 1, home=1)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("mask", "seq"), [("chunked", 48), ("nothing", 64)])
def test_what_nobody_sees_is_not_sent(pools, mask, seq, known):
    """Chunks of attention that are the chunks of the ranks; and no key at all."""
    case = MaskedCase(mask, world=4, seq=seq, known=known)
    assert pools[4].run(run_counted, case) == [{}] * 4
