"""Clocks of rings: rings without messages compute attention, and their replay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cpcompile.geometry.layout import Layout, Runs, TokenLayout
from cpcompile.ops.attention_spec import AttentionInputs, AttentionSpec
from cpcompile.ops.strategies.ring_schedule import Ring
from cpcompile.ops.strategies.ring_steps import ring_backward, ring_forward
from tests.support.bounds import OPERAND_SCALE, assert_close
from tools.bench.layouts import ring_clock as clock


def test_a_rank_goes_on_when_its_message_was_sent():
    """Rank 1 works for 2 s before it sends, and rank 0 for 1 s after it received."""
    slow = [("work", 2.0), ("send", 0), ("receive", 0), ("work", 0.5)]
    fast = [("work", 0.1), ("send", 0), ("receive", 0), ("work", 1.0)]
    assert clock.replay([fast, slow]) == 3.0
    assert clock.replay([slow, slow]) == 2.5
    assert clock.replay([[("work", 3.0)]]) == 3.0


def test_messages_that_are_never_sent():
    waits = [("receive", 0), ("send", 0)]
    with pytest.raises(ValueError, match="ranks wait for each other after"):
        clock.replay([waits, waits])


@pytest.mark.parametrize("layout", [Layout.CONTIGUOUS, Layout.ZIGZAG], ids=str)
def test_a_rank_alone_computes_its_share(layout):
    """Its steps are counted, and its messages; of dk and dv only its own part is."""
    ranks, length = 3, 24
    leaves = [
        x.requires_grad_() for x in torch.randn(3, 1, 2, length, 4).double().unbind()
    ]
    exact = F.scaled_dot_product_attention(*leaves, is_causal=True)
    exact.sum().backward()
    whole, dq = [x.detach() for x in leaves], leaves[0].grad
    tokens, runs = TokenLayout.of(layout, length, ranks), Runs.contiguous(length, ranks)
    positions = [tokens.positions(rank) for rank in range(ranks)]
    inputs = AttentionInputs(AttentionSpec(0.5, is_causal=True, layout=layout))
    dealt = None if layout is Layout.CONTIGUOUS else tokens
    chunks = [[x[:, :, p] for x in whole[1:]] for p in positions]
    for rank, own in enumerate(positions):
        qkv = [x[:, :, own] for x in whole]
        runners = [
            clock.Alone(
                Ring(runs, runs, True, "", rank, direction, dealt, inputs), chunks
            )
            for direction in ("forward", "backward")
        ]
        with clock.busy() as steps:
            out, lse = runners[0].run(ring_forward, *qkv)
            grads = runners[1].run(ring_backward, torch.ones_like(out), *qkv, out, lse)
        assert_close("out", out, exact[:, :, own], floor=OPERAND_SCALE)
        assert_close("dq", grads[0], dq[:, :, own], floor=OPERAND_SCALE)
        assert len(steps) == 2 * ranks
        for runner, messages in zip(runners, (ranks - 1, 2 * ranks - 1), strict=True):
            kinds = [kind for kind, _ in runner.events]
            assert kinds.count("send") == messages
            assert kinds.count("receive") == 2 * messages  # k and v, or dk and dv
