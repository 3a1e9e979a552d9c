"""Ten planted faults: cp.verify sees each, and names the call in which it is."""

from unittest import mock

import pytest

import cpcompile as cp
from tests.cpu.verification.faults import FAULTS, planted
from tests.cpu.verification.models import make_inputs, make_model

ATTENTION, SHIFTED = "scaled_dot_product_attention", ("k", "v")
RANKS = 3  # of two ranks, each is the next one and the previous one

# What is wrong there: (value or gradient, call, what it runs as, backward of).
WHERE = {
    "causal offset": ("the value", ATTENTION, "cp::ring_attention"),
    "dKV the other way": ("the gradient", "transpose", "transpose"),
    "KV head off by one": ("the value", ATTENTION, "cp::ring_attention"),
    "loss averaged per rank": ("the value", "cross_entropy", "cp_loss"),
    "missing gradient sum": ("the gradient", "parameter head.bias", "an input"),
    "stale positions": ("the value", "arange", "cp_shard"),
    "dropped padding": ("the value", ATTENTION, "cp::ring_attention"),
    "wrong scale": ("the value", ATTENTION, "cp::ring_attention"),
    "bf16 accumulation": ("the value", ATTENTION, "cp::ring_attention"),
    "no way back": ("the value", "add", "cp::relayout"),
}
LINES = {
    ATTENTION: "F.scaled_dot_product_attention(",
    "transpose": "part.unflatten(-1, (KV_HEADS, -1)).transpose(1, 2)",
    "cross_entropy": "F.cross_entropy(logits",
    "parameter head.bias": "self.head(x)",
    "arange": "torch.arange(tokens.shape[1]",
    "add": "x = x + self.attention(self.norm(x), mask)",
}


def verify(fault):
    """The report, as every rank gets it."""
    mixes = fault == "no way back"
    layout = "zigzag" if mixes else "contiguous"
    options = {
        "strategy": "ring",
        "layout": layout,
        "inner": "aot_eager",
        "tile": 0,
    }
    inputs = make_inputs(padded=fault == "dropped padding")
    with planted(fault), cp.config.patch(hardware="cpu"):
        return cp.verify(make_model(mixes=mixes), options=options, **inputs)


def test_every_fault_has_its_place():
    assert FAULTS.keys() == WHERE.keys() and len(FAULTS) == 10


@pytest.mark.slow(but=["stale positions"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported_at_its_call(pools, fault):
    reports = pools[RANKS].run(verify, fault, timeout=170)
    first, *others = reports
    what, call, written = WHERE[fault]
    assert not first.ok and first.exit_code == 1
    assert first.first is not None, first
    assert [x.first for x in others] == [first.first] * (RANKS - 1)
    place = first.first
    assert (place.what, place.call) == (what, call), place
    assert place.written.startswith(written), place
    assert LINES[call] in place.line and "models.py:" in place.line, place
    assert place.error > place.bound and place.dtype == "float64"
    if what == "the gradient" and call == "transpose":
        assert place.read_by == (ATTENTION,), place


@pytest.mark.slow(but=["no way back"])
@pytest.mark.parametrize("fault", ["no way back", "dropped padding"])
def test_without_the_fault_the_program_is_right(pools, fault):
    report = pools[RANKS].run(verify_without, fault, timeout=170)[0]
    assert report.ok and report.exit_code == 0 and report.first is None, report


def verify_without(fault):
    """The program of a fault, without it."""
    with mock.patch.dict(FAULTS, {fault: []}):
        return verify(fault)
