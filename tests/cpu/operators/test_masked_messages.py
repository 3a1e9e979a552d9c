"""How far chunks go in a ring under a mask, and how many messages that makes."""

from unittest import mock

import pytest

from cpcompile.geometry.layout import Layout
from cpcompile.ops.strategies import ring_steps
from tests.cpu.masked_cases import MaskedCase, check_masked, run_masked
from tests.cpu.on_ranks import on_ranks

KEYS, SUMS = "keys and values", "dk and dv"


# How far chunks go in each direction, and their sums home. Chunks of attention that are
# the chunks of the ranks, and no key at all, send nothing.
JUMPS = {
    **{MaskedCase("window", world=4, known=x): ([1], 3) for x in (False, True)},
    MaskedCase("both sides", world=4): ([1, 2], 1),
    MaskedCase("causal", world=4): ([1, 1, 1], 1),
    MaskedCase("causal", world=4, layout=Layout.ZIGZAG): ([1, 1, 1], 1),
    MaskedCase("bias of batch", world=4, seq=67): ([1, 1, 1], 1),
    **{
        MaskedCase(mask, world=4, seq=seq, known=x): ([], 0)
        for mask, seq in (("chunked", 48), ("nothing", 64))
        for x in (False, True)
    },
}


@pytest.mark.parametrize("case", JUMPS, ids=str)
@on_ranks(4)
def test_chunks_go_no_farther_than_somebody_sees_them(case):
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
    keys, home = JUMPS[case]
    wanted = {f"forward: {KEYS}": keys, f"backward: {KEYS}": keys}
    wanted[f"backward: {SUMS}"] = [*keys, home]
    assert sent == (wanted if keys else {})
