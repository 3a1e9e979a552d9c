"""The fuzzer on real ranks: its programs are equal, and it sees planted faults."""

import os
import sys
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from tests.fuzz.draw import Wishes, draw
from tests.fuzz.judge import IDLE, Judge, Verdict
from tests.fuzz.kinds import KINDS
from tests.fuzz.program import Program, Setting, Statement

FAULTS = ("wrong", "raise", "die", "hang")

pytestmark = pytest.mark.timeout(600)  # of a busy machine


@pytest.fixture(scope="module")
def judge():
    judge = Judge()
    yield judge
    judge.renew()


def test_random_programs_are_equal_or_refused(judge):
    for seed in range(6):
        outcome = judge.judge(draw(seed, Wishes((2,))))
        assert not outcome.verdict.ours, (seed, outcome.reason, outcome.details)
        assert outcome.verdict is not Verdict.INVALID, (seed, outcome.details)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_more_random_programs(judge, inner):
    number = 60 if inner == "aot_eager" else 10
    for seed in range(1000, 1000 + number):
        outcome = judge.judge(draw(seed, Wishes((2, 3), float(inner == "inductor"))))
        assert not outcome.verdict.ours, (seed, outcome.reason, outcome.details)


def plain_ring() -> Program:
    """One causal attention call, as a ring that is one operator."""
    choices = tuple(
        (choice, "is_causal" if choice == "pattern" else values[0])
        for choice, values in KINDS["attention"].choices.items()
    )
    source = Statement("source", "0", choices=(("how", "float"),), numbers=(0,))
    call = Statement("attention", "1", ("0",), choices, (0,))
    loss = Statement("loss", "2", ("1",), (("how", "square"),), (0,))
    setting = replace(Setting(), strategy="ring", unroll=0)
    return Program(0, setting, (source,), (call,), (loss,))


def plant(fault: str) -> None:
    """Make the backward of rings wrong on rank 1, in one way or another."""
    module = sys.modules["cpcompile.ops.strategies.ring_attention"]
    right = module.ring_backward

    def ring_backward(*args):
        dq, dk, *others = right(*args)
        if dist.get_rank() == 1:
            if fault == "wrong":
                dk = dk * (1 + 1e-6)
            elif fault == "raise":
                raise ZeroDivisionError("planted")
            elif fault == "die":
                os._exit(3)
            elif fault == "hang":
                time.sleep(1000)
        return dq, dk, *others

    module.ring_backward = ring_backward


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(judge, fault, monkeypatch):
    program = plain_ring()
    assert judge.judge(program).verdict is Verdict.EQUAL
    monkeypatch.setitem(IDLE, "aot_eager", 8.0)
    monkeypatch.setattr("tests.fuzz.judge.GRACE", 2.0)
    judge.pool(2).run(plant, fault)
    outcome = judge.judge(program)
    judge.renew()
    wanted = {"wrong": Verdict.WRONG, "hang": Verdict.HANG}
    assert outcome.verdict is wanted.get(fault, Verdict.CRASH), outcome
    if fault == "raise":
        assert outcome.reason.startswith("ZeroDivisionError: planted (on ranks [1]")
    if fault == "die":
        assert "exit code" in outcome.reason
