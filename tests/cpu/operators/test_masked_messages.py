"""Who sends keys to whom in a ring under a mask, and how many messages that makes."""

import importlib
from unittest import mock

import pytest

from cpcompile.ops.attention import ring_trips
from cpcompile.ops.attention.ring_trips import Trips
from cpcompile.plans import Layout
from tests.cpu.masked_cases import MaskedCase, check_masked, run_masked

# The package has the operator under this name.
ring_attention = importlib.import_module("cpcompile.ops.attention.ring_attention")


def run_counted(case):
    """How many messages this rank sends, of each kind."""
    sent = {}

    def counting(messages, received, group, where):
        kind = where.split(",")[0]
        direction = "backward" if "_backward" in where else "forward"
        key = f"{direction}: {kind}"
        sent[key] = sent.get(key, 0) + len(messages)
        return exchange(messages, received, group, where)

    exchange = ring_trips.exchange
    with mock.patch.object(ring_trips, "exchange", counting):
        got = run_masked(case)
    if got is not None:
        check_masked(case, got)
    return {kind: count for kind, count in sent.items() if count}


KEYS, SUMS, HOME = "keys and values", "dk and dv", "dk and dv on their way home"


def test_a_window_sends_to_the_next_rank_only(pools):
    """Each but the last has one neighbour that sees its keys."""
    sent = pools[4].run(run_counted, MaskedCase("window", world=4))
    forward, backward = f"forward: {KEYS}", f"backward: {KEYS}"
    first = {forward: 1, backward: 1, f"backward: {SUMS}": 1}
    last = {f"backward: {HOME}": 1}
    assert sent == [first, first | last, first | last, last]


def test_a_window_in_both_directions_sends_two_messages(pools):
    sent = pools[4].run(run_counted, MaskedCase("both sides", world=4))
    total = [each.get(f"forward: {KEYS}", 0) for each in sent]
    assert max(total) == 2
    # Chunk 0 goes to rank 1, and each other one to both sides.
    assert sum(total) == 1 + 3 * 2


@pytest.mark.parametrize("layout", [Layout.CONTIGUOUS, Layout.ZIGZAG], ids=str)
def test_a_causal_mask_sends_all_there_is(pools, layout):
    sent = pools[4].run(run_counted, MaskedCase("causal", world=4, layout=layout))
    total = sum(each.get(f"forward: {KEYS}", 0) for each in sent)
    assert total == (3 + 2 + 1 if layout is Layout.CONTIGUOUS else 4 * 3)


def test_what_nobody_sees_is_not_sent(pools):
    """Chunks of attention that are the chunks of the ranks; and no key at all."""
    assert pools[4].run(run_counted, MaskedCase("chunked", world=4, seq=48)) == [{}] * 4
    assert pools[4].run(run_counted, MaskedCase("nothing", world=4)) == [{}] * 4


def run_everywhere(case):
    """As on a GPU: every chunk takes every jump."""

    def trips(needed, everywhere):
        return Trips(needed, everywhere=True)

    with mock.patch.object(ring_attention, "Trips", trips):
        return run_counted(case)


@pytest.mark.parametrize("mask", ["window", "both sides", "bias of batch", "nothing"])
def test_all_ranks_take_part_on_a_gpu(pools, mask):
    """In every jump that any rank needs, and in no other."""
    jumps = {"window": 1, "both sides": 2, "bias of batch": 3, "nothing": 0}[mask]
    sent = pools[4].run(run_everywhere, MaskedCase(mask, world=4, seq=67))
    if not jumps:
        assert sent == [{}] * 4
        return
    forward, backward = f"forward: {KEYS}", f"backward: {KEYS}"
    each = {forward: jumps, backward: jumps, f"backward: {SUMS}": jumps}
    assert sent == [each | {f"backward: {HOME}": 1}] * 4
