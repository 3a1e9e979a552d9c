"""`tools.bench peers`: its mechanics; timings are what they are."""

from __future__ import annotations

import pytest

from tools.bench.peers.attentions import NAIVE, ONE_PROCESS, OURS
from tools.bench.peers.bench import Case, time_peers
from tools.bench.peers.documents import Mask
from tools.bench.ranks import in_processes


@pytest.mark.parametrize(("dtype", "mask"), [("float32", Mask.PACKED)])
def test_peers_are_right_and_take_turns(dtype: str, mask: Mask) -> None:
    """Each is compared with exact results first; others say why they are left out."""
    case = Case(dtype, mask, tokens=256, reps=1)
    events = list(in_processes(2, time_peers, [case]))
    timed = {x["peer"] for kind, x in events if kind == "times"}
    assert timed >= {*OURS, NAIVE, ONE_PROCESS}
    (chosen,) = [x["peer"] for kind, x in events if kind == "chosen"]
    assert chosen in OURS
    reasons = {x["peer"]: x["reason"] for kind, x in events if kind == "left_out"}
    assert "takes no mask" in reasons["torch_ring_balanced"]
    assert not timed & set(reasons)
